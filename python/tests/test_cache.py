"""Tests of the client with the cache that GINNEL_TEST_CACHE names, and its server. They remove all items of this cache."""

import os
import subprocess
import sys
import tempfile
import threading
import unittest
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
ADDRESS = os.environ.get("GINNEL_TEST_CACHE")


class Wheel(unittest.TestCase):
    def test_the_wheel_has_the_package_and_nothing_else(self):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, HERE / "backend.py", folder], check=True, stdout=subprocess.DEVNULL)
            (wheel,) = Path(folder).glob("ginnel-*-py3-none-any.whl")
            names = zipfile.ZipFile(wheel).namelist()
            info = {name for name in names if ".dist-info/" in name}
            self.assertEqual(
                set(names) - info,
                {"ginnel/__init__.py", "ginnel/_cache.py", "ginnel/_library.py", "ginnel/py.typed"},
            )
            self.assertEqual({name.rsplit("/")[-1] for name in info}, {"METADATA", "RECORD", "WHEEL"})


@unittest.skipUnless(ADDRESS, "GINNEL_TEST_CACHE names no cache")
class TestCache(unittest.TestCase):
    def setUp(self):
        import ginnel

        self.ginnel = ginnel
        self.cache = ginnel.Cache(ADDRESS)
        self.cache.flush()

    def tearDown(self):
        self.cache.close()

    def test_values(self):
        cache = self.cache
        self.assertIsNone(cache.get("a"))
        self.assertEqual(cache.get("a", 7), 7)
        version = cache.set("a", "grüezi", flags=5)
        self.assertEqual(cache.get("a"), "grüezi".encode())
        self.assertEqual(cache.get(b"a"), "grüezi".encode())
        self.assertEqual(cache.get_item("a"), self.ginnel.Item("grüezi".encode(), 5, version))
        self.assertIsNone(cache.get_item("b"))
        self.assertFalse(cache.add("a", b"x"))
        self.assertTrue(cache.add("b", b"x"))
        self.assertFalse(cache.replace("c", b"x"))
        self.assertTrue(cache.replace("b", memoryview(b"y")))
        self.assertTrue(cache.append("b", b">") and cache.prepend("b", b"<"))
        self.assertFalse(cache.append("c", b">") or cache.prepend("c", b"<"))
        self.assertEqual(cache.get("b"), b"<y>")
        self.assertTrue(cache.delete("b"))
        self.assertFalse(cache.delete("b"))
        self.assertTrue(cache.touch("a", 1000))
        self.assertFalse(cache.touch("b", 1000))
        cache.set("empty", b"")
        self.assertEqual(cache.get("empty"), b"")

    def test_versions(self):
        cache = self.cache
        self.assertIsNone(cache.cas("a", b"x", 1))
        version = cache.set("a", b"1")
        self.assertIs(cache.cas("a", b"2", version), True)
        self.assertIs(cache.cas("a", b"3", version), False)
        self.assertEqual(cache.get("a"), b"2")

    def test_numbers(self):
        cache = self.cache
        self.assertIsNone(cache.incr("n"))
        cache.set("n", "10")
        self.assertEqual(cache.incr("n", 5), 15)
        self.assertEqual(cache.decr("n"), 14)
        self.assertEqual(cache.decr("n", 100), 0)
        cache.set("n", "ten")
        with self.assertRaises(self.ginnel.Refused):
            cache.incr("n")

    def test_many(self):
        cache = self.cache
        values = {f"key {number}": b"%d" % number * (number % 300) for number in range(3000)}
        self.assertEqual(cache.set_many(values), {})
        self.assertEqual(cache.get_many([*values, "none"]), values)
        self.assertEqual(cache.get_many([b"key 7"]), {b"key 7": values["key 7"]})
        self.assertEqual(cache.get_many([]), {})
        failed = cache.set_many({"": b"x", "fine": b"y"})
        self.assertEqual(list(failed), [""])
        self.assertEqual(cache.get("fine"), b"y")

    def test_large_values(self):
        cache = self.cache
        large = os.urandom(300_000)
        cache.set("large", large)
        cache.set("small", b"x")
        self.assertEqual(cache.get_many(["small", "large"]), {"small": b"x", "large": large})
        self.assertEqual(cache.get("large"), large)
        self.assertEqual(cache.get_item("large").value, large)

    def test_as_a_dict(self):
        cache = self.cache
        self.assertNotIn("a", cache)
        with self.assertRaises(KeyError):
            cache["a"]
        with self.assertRaises(KeyError):
            del cache["a"]
        cache["a"] = b"x"
        self.assertIn("a", cache)
        self.assertEqual(cache["a"], b"x")
        del cache["a"]
        self.assertNotIn("a", cache)

    def test_threads(self):
        cache = self.cache
        cache.set("n", "0")
        values = {f"{number}": b"%d" % number * 50 for number in range(100)}
        cache.set_many(values)
        wrong = []

        def work():
            for _ in range(50):
                cache.incr("n")
                wrong.extend(key for key, value in values.items() if cache.get(key) != value)

        threads = [threading.Thread(target=work) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        self.assertEqual((cache.get("n"), wrong), (b"200", []))

    def test_errors(self):
        ginnel = self.ginnel
        segment = ADDRESS.split("/")[0]
        with self.assertRaises(ginnel.NotFound):
            ginnel.Cache(f"{segment}/there-is-none", patience=0)
        with self.assertRaises(ginnel.NotFound):
            ginnel.Cache("there-is-none/x", patience=0)
        with self.assertRaises(ginnel.Error):
            self.cache.get("")
        with self.assertRaises(ginnel.Error):
            self.cache.get("k" * 251)
        with ginnel.Cache(ADDRESS, changes="unix /nowhere", patience=0) as alone:
            self.cache.set("a", b"x")
            self.assertEqual(alone.get("a"), b"x")
            with self.assertRaises(ginnel.NoServer):
                alone.set("a", b"y")
        with self.assertRaises(ginnel.Error):
            alone.get("a")

    def test_statistics(self):
        cache = self.cache
        before = cache.counters()
        cache.set("a", b"x")
        cache.get("a"), cache.get("b")
        after = cache.counters()
        self.assertEqual((after.hits - before.hits, after.misses - before.misses), (1, 1))
        self.assertGreater(int(cache.stats()["cmd_set"]), 0)


if __name__ == "__main__":
    unittest.main()
