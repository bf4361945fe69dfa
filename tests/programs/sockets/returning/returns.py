# What the report says about this process's connections.
import json
import os


def report():
    ends = {}
    for line in open(os.environ['GINNEL_SOCKETS_REPORT']):
        if not line.endswith('\n'):
            break
        record = json.loads(line)
        ends[record.get('connection')] = record
    return ends.values()


def returns():
    return sum(end.get('returns', 0) for end in report())


def returned():
    return sum(end.get('returned', 0) for end in report())
