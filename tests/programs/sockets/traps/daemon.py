# Becomes a daemon, as the C library's `daemon` does, and executes other programs.
import os
import subprocess

from checks import works
from pairs import pair

a, b = pair()
subprocess.run(['true'], check=True)
assert os.system('exit 7') == 7 << 8
works(a, b)
# As `daemon` does: the grandchild continues, and its parents end.
there, here = os.pipe()
child = os.fork()
if child == 0:
    os.setsid()
    if os.fork() == 0:
        works(a, b)
        subprocess.run(['true'], check=True)
        works(a, b)
        os.write(here, b'worked')
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
a.close()
b.close()
os.close(here)
assert os.read(there, 100) == b'worked'
