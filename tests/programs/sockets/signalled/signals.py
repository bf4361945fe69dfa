# Signals (SIGIO) when data has arrived.
import fcntl
import os
import signal
import struct
import termios

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGIO, signal.SIGUSR1])


def ask_for_signals(c, how):
    fcntl.fcntl(c, fcntl.F_SETOWN, os.getpid())
    if how == 'ioctl':
        fcntl.ioctl(c, termios.FIOASYNC, struct.pack('i', 1))
    else:
        fcntl.fcntl(c, fcntl.F_SETFL, fcntl.fcntl(c, fcntl.F_GETFL) | os.O_ASYNC)


def signals():
    return signal.sigtimedwait([signal.SIGIO], 20) is not None


def ping(one, other):
    # Earlier signals do not count.
    while signal.sigtimedwait([signal.SIGIO], 0):
        pass
    other.sendall(b'.')
    assert signals(), 'no signal'
    assert one.recv(1) == b'.'
    one.sendall(b'!')
    assert other.recv(1) == b'!'
