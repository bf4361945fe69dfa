"""Builds the wheel of this package with Python alone (PEP 517).

``python3 backend.py DIR`` does it by hand.
"""

import base64
import hashlib
import pathlib
import sys
import tarfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
#: A fixed time stamp, so that the same sources make the same archive.
WHEN = (2024, 1, 1, 0, 0, 0)


def _project():
    """Reads the few values of pyproject.toml that go into the archive. Python before 3.11 has no parser for such files."""
    fields = {}
    for line in (HERE / "pyproject.toml").read_text().splitlines():
        key, equals, value = line.partition(" = ")
        if equals and key in ("name", "version", "description", "requires-python"):
            fields[key] = value.strip('"')
    return fields


def _metadata(project):
    return (
        "Metadata-Version: 2.1\n"
        f"Name: {project['name']}\n"
        f"Version: {project['version']}\n"
        f"Summary: {project['description']}\n"
        f"Requires-Python: {project['requires-python']}\n"
        "License: Apache-2.0 OR MIT\n"
        "Classifier: Operating System :: POSIX :: Linux\n"
        "Classifier: Typing :: Typed\n"
        "Description-Content-Type: text/markdown\n\n" + (HERE / "README.md").read_text()
    )


def get_requires_for_build_wheel(config_settings=None):
    return []


get_requires_for_build_sdist = get_requires_for_build_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    project = _project()
    stem = f"{project['name']}-{project['version']}"
    files = {f"ginnel/{path.name}": path.read_bytes() for path in sorted((HERE / "ginnel").glob("*")) if path.is_file()}
    info = f"{stem}.dist-info"
    files[f"{info}/METADATA"] = _metadata(project).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: ginnel\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    wheel = f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, WHEN)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return wheel


def build_sdist(sdist_directory, config_settings=None):
    project = _project()
    stem = f"{project['name']}-{project['version']}"
    (HERE / "PKG-INFO").write_text(_metadata(project))
    try:
        with tarfile.open(pathlib.Path(sdist_directory) / f"{stem}.tar.gz", "w:gz") as archive:
            for part in ("PKG-INFO", "pyproject.toml", "README.md", "backend.py", "ginnel", "tests"):
                archive.add(HERE / part, f"{stem}/{part}", filter=lambda f: None if "__pycache__" in f.name else f)
    finally:
        (HERE / "PKG-INFO").unlink()
    return f"{stem}.tar.gz"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    pathlib.Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    print(build_wheel(sys.argv[1]))
