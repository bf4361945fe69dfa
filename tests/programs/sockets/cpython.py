# Writes the outcome of each test of a module, one per line: `runner.py OUTCOMES MODULE PATTERN...`.
import fnmatch
import sys
import unittest

from test import support
# No network resources, as in `python3 -m test`.
support.use_resources = []
outcomes, module, patterns = open(sys.argv[1], 'w', 1), sys.argv[2], sys.argv[3:]
ignored = [
    # Not all machines have it, and it is not TCP.
    '*VSOCK*',
]


class Result(unittest.TextTestResult):
    def say(self, test, outcome):
        print(test.id(), outcome, file=outcomes)

    def addSuccess(self, test):
        super().addSuccess(test)
        self.say(test, 'ok')

    def addError(self, test, err):
        super().addError(test, err)
        self.say(test, 'error')

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.say(test, 'failure')

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.say(test, 'skipped')

    def addExpectedFailure(self, test, err):
        super().addExpectedFailure(test, err)
        self.say(test, 'expected failure')

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.say(test, 'unexpected success')

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.say(subtest, 'failure')


def select(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from select(test)
        elif any(fnmatch.fnmatchcase(test.id(), pattern) for pattern in ignored):
            pass
        elif any(fnmatch.fnmatchcase(test.id(), pattern) for pattern in patterns):
            yield test


tests = unittest.TestSuite(select(unittest.defaultTestLoader.loadTestsFromName(module)))
unittest.TextTestRunner(sys.stderr, verbosity=2, resultclass=Result).run(tests)
