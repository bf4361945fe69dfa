"""The part of libginnel that caches need. Names are those of ginnel.h."""

import ctypes
import os
import struct
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_ssize_t, c_uint32, c_uint64, c_void_p
from typing import Dict, Type

ABI = 0

NO_ITEM = -3
NOT_STORED = -4
CHANGED = -5
LOST = -113
TOO_LONG = -205
BUFFER_TOO_SMALL = -206
NO_SEGMENT = -303
NOT_FOUND = -312
SERVER = -320
NO_SERVER = -405


class Options(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("socket", c_char_p),
        ("name", c_char_p),
        ("changes", c_char_p),
        ("patience_ns", c_int64),
        ("timeout_ns", c_uint64),
    ]


class Item(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("length", c_size_t), ("cas", c_uint64), ("flags", c_uint32)]


#: Structures that are passed in arrays. Packing them as plain bytes takes a third of the time of ctypes structures.
KEY = struct.Struct("@PN")
FOUND = struct.Struct("@iIQNN")
ENTRY = struct.Struct("@PNPNII")
STORED = struct.Struct("@i4xQ")


class Counters(ctypes.Structure):
    _fields_ = [("size", c_size_t)] + [
        (name, c_uint64) for name in ("hits", "misses", "asked", "lost", "connections", "reported")
    ]


class Error(Exception):
    """An operation failed. ``status`` is the number of the error in ginnel.h."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class NotFound(Error):
    """There is no such cache, or no such segment."""


class NoServer(Error):
    """No server of the cache can be reached. Nothing was changed."""


class Lost(Error):
    """The server has not answered. It may or may not have done what it was asked for."""


class TooLarge(Error):
    """The value is longer than an item of this cache may be."""


class Refused(Error):
    """The server refuses; the text is its message."""


_CLASSES: Dict[int, Type[Error]] = {
    NOT_FOUND: NotFound,
    NO_SEGMENT: NotFound,
    NO_SERVER: NoServer,
    LOST: Lost,
    TOO_LONG: TooLarge,
    SERVER: Refused,
}


def _load() -> ctypes.CDLL:
    named = os.environ.get("GINNEL_LIBRARY")
    soname = f"libginnel.so.{ABI}"
    tried = [named] if named else [soname, f"/usr/local/lib/{soname}"]
    problems = []
    for path in tried:
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            problems.append(str(error))
    raise ImportError(
        f"{'; '.join(problems)}. Install Ginnel's C library (make -C crates/faces/capi install), or name it in GINNEL_LIBRARY"
    )


_library = _load()
_key = [c_void_p, c_char_p, c_size_t]
_value = [c_char_p, c_size_t]
_store = _key + _value + [c_uint32, c_uint32, POINTER(c_uint64)]


def _function(name: str, arguments, result=c_int):
    function = getattr(_library, f"ginnel_{name}")
    function.argtypes, function.restype = arguments, result
    return function


last_error = _function("last_error", [], c_char_p)
strerror = _function("strerror", [c_int], c_char_p)
string_free = _function("string_free", [c_void_p], None)
cache_open = _function("cache_open", [c_char_p, POINTER(Options), POINTER(c_void_p)])
cache_close = _function("cache_close", [c_void_p])
# The types of the arguments are not declared, which makes a call a third faster. So the caller must pass the right types: c_void_p, bytes,
# a length that fits into an int, c_void_p, c_size_t, and c_void_p or None.
cache_get = _library.ginnel_cache_get
cache_get.restype = c_ssize_t
cache_get_many = _function(
    "cache_get_many", [c_void_p, c_char_p, c_size_t, c_void_p, c_size_t, c_void_p], c_ssize_t
)
cache_set = _function("cache_set", _store)
cache_set_many = _function("cache_set_many", [c_void_p, c_char_p, c_size_t, c_void_p], c_ssize_t)
cache_add = _function("cache_add", _store)
cache_replace = _function("cache_replace", _store)
cache_append = _function("cache_append", _key + _value + [POINTER(c_uint64)])
cache_prepend = _function("cache_prepend", _key + _value + [POINTER(c_uint64)])
cache_cas = _function("cache_cas", _store)
cache_delete = _function("cache_delete", _key)
cache_increment = _function("cache_increment", _key + [c_uint64, POINTER(c_uint64)])
cache_decrement = _function("cache_decrement", _key + [c_uint64, POINTER(c_uint64)])
cache_touch = _function("cache_touch", _key + [c_uint32])
cache_flush = _function("cache_flush", [c_void_p])
cache_stats = _function("cache_stats", [c_void_p, c_char_p, POINTER(c_void_p)])
cache_get_counters = _function("cache_get_counters", [c_void_p, POINTER(Counters)])


def failure(status: int) -> Error:
    """Returns the error of the last call of this thread that failed."""
    return _CLASSES.get(status, Error)(status, last_error().decode(errors="replace"))


def failure_of_one(status: int) -> Error:
    """Returns the error of one item of many, for which there are no details."""
    return _CLASSES.get(status, Error)(status, strerror(status).decode())


def check(status: int) -> int:
    """Returns ``status``, and raises an error if it is negative."""
    if status < 0:
        raise failure(status)
    return status
