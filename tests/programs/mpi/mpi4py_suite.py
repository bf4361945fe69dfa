"""Runs the tests of mpi4py in a folder, and prints which of them have passed on all ranks, which were skipped, and which failed.

mpi4py_suite.py FOLDER NAME...     leaves out the tests whose names begin with one of these
"""

import sys
import unittest

folder, *without = sys.argv[1:]
sys.argv[1:] = []


class WithoutGraphicsCards:
    """Finds no packages for memory of graphics cards, which a machine that has them need not have."""

    def find_spec(self, name, *_):
        if name in ('cupy', 'numba'):
            raise ImportError(name)


sys.meta_path.insert(0, WithoutGraphicsCards())

# Not before the arguments are taken away, because MPI may look at them.
from mpi4py import MPI  # noqa: E402


def tests_of(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from tests_of(test)
        elif not any(test.id().startswith(name) for name in without):
            yield test


class Result(unittest.TextTestResult):
    """Records the names of the tests that have passed."""

    def __init__(self, *args):
        super().__init__(*args)
        self.passed = []

    def addSuccess(self, test):
        self.passed.append(test.id())


# All ranks run the same tests in the same order.
tests = list(tests_of(unittest.defaultTestLoader.discover(folder)))
result = unittest.TextTestRunner(resultclass=Result, verbosity=0).run(unittest.TestSuite(tests))
problems = [test.id() for test, _ in result.failures + result.errors]
everywhere = MPI.COMM_WORLD.gather((result.passed, problems))
if MPI.COMM_WORLD.rank == 0:
    for name in sorted(set.intersection(*(set(passed) for passed, _ in everywhere))):
        print("passed", name)
    for name in sorted({name for _, problems in everywhere for name in problems}):
        print("failed", name)
    print(f"all ranks have run {len(tests)} tests", flush=True)
