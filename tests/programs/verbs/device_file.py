# Looks for the file of the device that the argument names, as UCX does.
import errno
import os
import stat
import sys

at = '/dev/infiniband/'
mine = at + sys.argv[1]
assert stat.S_ISCHR(os.stat(mine).st_mode)
assert os.access(mine, os.R_OK | os.W_OK) and not os.access(mine, os.X_OK)
for other in [at + 'ginnelx', mine[1:], '/tmp' + mine, at + 'ginnel']:
    assert not os.access(other, os.F_OK), other
    try:
        os.stat(other)
        assert False, other
    except OSError as error:
        assert error.errno == errno.ENOENT, error
assert stat.S_ISDIR(os.stat('/dev').st_mode) and os.access('/dev', os.X_OK)
assert stat.S_ISREG(os.stat(sys.executable).st_mode)
