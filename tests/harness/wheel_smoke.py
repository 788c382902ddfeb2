"""Builds the wheel, installs it into an empty environment, and uses it there (`make wheel`)."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "strategy": "thunder_memsave",
    "callbacks": "thunder_memsave/callbacks",
    "configs": "thunder_memsave/configs",
}
PACKAGED = {".py", ".yaml", ".typed", ".css", ".js"}
USE = """
import importlib.metadata, importlib.resources, pathlib, sys
import thunder_memsave
assert pathlib.Path(sys.prefix) in pathlib.Path(thunder_memsave.__file__).parents
assert thunder_memsave.__version__ == importlib.metadata.version("thunder-memsave")
assert (importlib.resources.files("thunder_memsave.configs") / "__init__.py").is_file()
"""
USE_BY_NAME = """
from lightning.fabric import Fabric
strategy = Fabric(strategy="thunder_memsave", accelerator="cpu", devices=1).strategy
assert type(strategy).__name__ == "ThunderMemsaveStrategy", strategy
"""


def main() -> None:
    """Fail if a file is missing in the wheel, or something does not run from it."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        compare_with_tree(wheel)
        environment = install(wheel, Path(folder) / "environment")
        python = environment / "bin" / "python"
        run(python, "-I", "-c", USE, cwd=folder)
        run(python, "-I", "-c", USE_BY_NAME, cwd=folder)
        run(python, "-I", "-m", "thunder_memsave", "--help", cwd=folder)
        run(environment / "bin" / "thunder-memsave", "--help", cwd=folder)
    print(f"{wheel.name}: complete, and works on its own")


def build(folder: Path) -> Path:
    """Build the source archive, and the wheel out of it, as a release does."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def compare_with_tree(wheel: Path) -> None:
    """Refuse a wheel that lacks a file: an editable install finds it, an installed one does not."""
    with zipfile.ZipFile(wheel) as archive:
        packaged = {name for name in archive.namelist() if name.startswith("thunder_memsave/")}
    tree = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in PACKAGED
    }
    if packaged != tree:
        sys.exit(
            f"{wheel.name} lacks {sorted(tree - packaged)} and has {sorted(packaged - tree)} too "
            "much: correct `packages` and `package-data` in pyproject.toml."
        )


def install(wheel: Path, environment: Path) -> Path:
    """Install the wheel alone; its dependencies are borrowed from the running environment."""
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A path line does not run the .pth files there, so our editable install stays out of sight.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment


def run(*command: str | Path, cwd: str | Path) -> None:
    """Run a command quietly; show its output if it fails."""
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")


if __name__ == "__main__":
    main()
