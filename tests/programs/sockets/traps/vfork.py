# Creates subprocesses while it has a connection.
import subprocess

from checks import works
from pairs import pair

a, b = pair()
for turn in range(20):
    # This Python creates subprocesses with vfork, which close or replace (with dup2) the descriptors that they must not get.
    said = subprocess.run(['cat'], input=b'%d' % turn, stdout=subprocess.PIPE, close_fds=True, check=True)
    assert said.stdout == b'%d' % turn
    works(a, b)
