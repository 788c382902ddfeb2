"""The pictures in docs/images whose contents need no training are what the command shows today."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from harness.fabric import run_python
from harness.language_model import write_model

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs/images"


@pytest.fixture
def screenshots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("shots", ROOT / "docs/make_screenshots.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "IMAGES", tmp_path / "images")
    monkeypatch.chdir(tmp_path)
    return module


def test_pictures_are_up_to_date(screenshots: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(screenshots._WRONG, encoding="utf-8")
    run_python(["-m", "thunder_memsave.configs.tiny"])
    write_model(tmp_path / "runs" / "tiny_pretrain" / "model")  # which one does not show
    screenshots.shoot("configs list", "configs_list")
    screenshots.shoot("train wrong.yaml", "error")
    for name in ("configs_list.svg", "error.svg"):
        made = (tmp_path / "images" / name).read_text(encoding="utf-8")
        assert made == (IMAGES / name).read_text(encoding="utf-8"), (
            f"{name} is out of date; run docs/make_screenshots.py"
        )
