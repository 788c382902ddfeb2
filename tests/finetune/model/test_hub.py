from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, constants
from transformers import AutoModelForCausalLM, LlamaConfig
from typing_extensions import override

from harness.language_model import llama_config
from thunder_memsave.finetune.model.build import build_model, load_tokenizer
from thunder_memsave.finetune.model.hub import _from_hub, is_hub_name
from thunder_memsave.finetune.model.hub import model_directory as directory_of
from thunder_memsave.finetune.run_file.config import DataConfig, ModelConfig, RunConfig
from thunder_memsave.settings.problems import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """As much of the hub's API as one model needs, on this machine."""

    files: dict[str, bytes]
    error: tuple[int, str] | None = None
    """Status and `X-Error-Code` of every answer about files."""

    delay_s: float = 0.0
    """Seconds that the weights take."""

    requested: list[str] = field(default_factory=list)
    """Names of the files that were downloaded."""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        _, is_known, rest = path.partition("org/name")
        if not is_known:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if path.startswith("/api/models/") and "/tree/" in rest:
            return 200, {}, json.dumps([_entry(*file) for file in self.files.items()]).encode()
        if path.startswith("/api/models/"):
            if "/revision/" in rest and rest.split("/")[-1] not in ("main", "v1", COMMIT):
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            info = {"id": "org/name", "sha": COMMIT, "siblings": [], "tags": []}
            return 200, {}, json.dumps(info).encode()
        if self.error is not None:
            return self.error[0], {"X-Error-Code": self.error[1]}, b""
        if rest.endswith(".safetensors"):
            time.sleep(self.delay_s)
        content = self.files[rest.split(f"/resolve/{COMMIT}/")[1]]
        return 200, {"ETag": f'"{sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}, content


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": sha1(content).hexdigest()}


def handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if "/resolve/" in self.path:
                hub.requested.append(self.path.split(f"/{COMMIT}/")[-1])
            self._send(with_body=True)

        def do_HEAD(self) -> None:
            self._send(with_body=False)

        def _send(self, *, with_body: bool) -> None:
            status, headers, body = hub.answer(self.path.split("?")[0])
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        @override
        def log_message(self, format: str, *arguments: Any) -> None:
            del format, arguments

    return Handler


def go_online(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Restore the hub's constants, which HF_HUB_OFFLINE and a missing HF_ENDPOINT set at import."""
    urls = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", urls)
    close_session()


StartHub = Callable[[dict[str, bytes]], Hub]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty cache; the tests are offline anyway."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    _from_hub.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def start_hub(offline: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartHub]:
    """Serve files as `org/name`, at revisions `main` and `v1`, and go online with it."""
    servers = []

    def start(files: dict[str, bytes]) -> Hub:
        hub = Hub(files)
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(hub))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        servers.append((server, thread))
        go_online(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        return hub

    yield start
    close_session()
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="session")
def model_files(model_directory: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in model_directory.iterdir()}
    others = ("original/params.json", "pytorch_model.bin", "consolidated.safetensors", "README.md")
    return files | dict.fromkeys(others, b"not needed")


def named(name: str = "org/name", **values: Any) -> ModelConfig:
    return ModelConfig(name_or_path=name, **values)


def test_only_the_files_that_a_run_needs_are_fetched(
    start_hub: StartHub, model_files: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    hub = start_hub(model_files)
    directory = directory_of(named())
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert needed <= set(hub.requested)
    assert {name.rpartition(".")[2] for name in hub.requested} == {"json", "jinja", "safetensors"}
    assert not {"original/params.json", "consolidated.safetensors"} & set(hub.requested)
    assert (directory / "model.safetensors").read_bytes() == model_files["model.safetensors"]
    assert "fetching 1 weight file of org/name from the hub" in capfd.readouterr().err


def test_what_is_cached_is_not_fetched_again_and_serves_offline(
    start_hub: StartHub, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = start_hub(model_files)
    first = directory_of(named(revision="v1"))
    num_requested = len(hub.requested)
    _from_hub.cache_clear()
    assert directory_of(named(revision="v1")) == first
    assert len(hub.requested) == num_requested
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    _from_hub.cache_clear()
    assert directory_of(named(revision="v1")) == first


def test_one_process_fetches_while_the_others_wait(
    start_hub: StartHub, model_files: dict[str, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    hub = start_hub(model_files)
    hub.delay_s = 0.3
    # The lock is a file lock, so threads wait for it as processes do.
    threads = [
        threading.Thread(target=_from_hub.__wrapped__, args=("org/name", None, True))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(hub.requested) == len(set(hub.requested))
    assert capfd.readouterr().err.count("fetching 1 weight file") == 1


def test_the_shards_that_an_index_names_are_fetched(
    start_hub: StartHub, tmp_path: Path, model_files: dict[str, bytes]
) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**llama_config()))
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    shards = {path.name: path.read_bytes() for path in (tmp_path / "sharded").iterdir()}
    hub = start_hub({**model_files, **shards})
    directory = directory_of(named())
    numbered = {name for name in shards if name.startswith("model-")}
    assert len(numbered) > 1
    assert numbered <= set(hub.requested)
    assert "model.safetensors" not in hub.requested
    assert numbered <= {path.name for path in directory.iterdir()}


def test_with_a_config_in_the_run_file_only_the_tokenizer_is_fetched(
    start_hub: StartHub, model_files: dict[str, bytes]
) -> None:
    hub = start_hub(model_files)
    tokenizer = load_tokenizer(named(config={"model_type": "llama"}))
    assert tokenizer.eos_token == "<end>"
    assert not {"config.json", "model.safetensors"} & set(hub.requested)


def test_a_model_of_the_hub_is_built_under_its_name(
    start_hub: StartHub, model_files: dict[str, bytes]
) -> None:
    start_hub(model_files)
    config = RunConfig(
        model=named(revision="v1"), lora={"r": 2}, data=DataConfig(max_seq_length=32)
    )
    model: Any = build_model(config, load_tokenizer(config.model))
    adapter = model.peft_config["default"]
    assert (adapter.base_model_name_or_path, adapter.revision) == ("org/name", "v1")


def test_a_name_is_of_the_hub_unless_it_is_a_directory_or_looks_like_a_path(
    tmp_path: Path,
) -> None:
    assert is_hub_name(named("org/name"))
    assert is_hub_name(named("gpt2"))
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not is_hub_name(named("org/name"))
    assert not is_hub_name(named("./org/other"))
    assert not is_hub_name(named("models/org/name"))


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "GatedRepo", "whose licence must be accepted on its page .* `hf auth login`"),
        (
            401,
            "RepoNotFound",
            "which is neither a directory here nor a model on the hub; .* `hf auth login`",
        ),
        (403, "", "which the hub refuses to give: .*403"),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_refused_with_what_to_do(
    start_hub: StartHub, model_files: dict[str, bytes], status: int, code: str, message: str
) -> None:
    start_hub(model_files).error = (status, code)
    with pytest.raises(ConfigError, match=f"model.name_or_path is 'org/name', {message}") as error:
        directory_of(named())
    assert error.value.key == "model.name_or_path"


def test_names_and_revisions_that_the_hub_does_not_know_are_refused(
    start_hub: StartHub, model_files: dict[str, bytes]
) -> None:
    start_hub(model_files)
    with pytest.raises(ConfigError, match="'org/other', which is neither a directory here nor"):
        directory_of(named("org/other"))
    with pytest.raises(ConfigError, match=r"model\.revision is 'v2', which org/name does not") as e:
        directory_of(named(revision="v2"))
    assert e.value.key == "model.revision"
    with pytest.raises(ConfigError, match=r"'\./name', which is not a directory here, and no name"):
        directory_of(named("./name"))
    with pytest.raises(ConfigError, match="'org/a--b', which cannot be a name on the hub"):
        directory_of(named("org/a--b"))


def test_without_a_network_or_a_cached_model_it_says_which(
    offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set; unset it, or fetch the model"):
        directory_of(named())
    go_online(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"fetching it from the hub failed: .*Check the network"):
        directory_of(named())
    close_session()


def test_a_relative_path_means_another_model_from_another_directory(
    tmp_path: Path, model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_directory.parent)
    assert directory_of(named(model_directory.name)) == Path(model_directory.name)
    monkeypatch.chdir(tmp_path)
    empty = Path("run") / model_directory.name
    with pytest.raises(ConfigError, match="is not a directory here"):
        directory_of(named(f"./{model_directory.name}"))
    empty.mkdir(parents=True)
    monkeypatch.chdir("run")
    with pytest.raises(ConfigError, match=r"has neither model\.safetensors nor"):
        directory_of(named(model_directory.name))


def test_a_directory_has_no_revision(model_directory: Path) -> None:
    with pytest.raises(ConfigError, match="revisions are the hub's: leave it out") as error:
        directory_of(named(str(model_directory), revision="main"))
    assert error.value.key == "model.revision"


def test_weights_that_are_missing_or_damaged_are_refused(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ConfigError, match=message) as error:
            directory_of(named(str(tmp_path)))
        assert error.value.key == "model.name_or_path"

    (tmp_path / "pytorch_model.bin").touch()
    refused(r"has neither model\.safetensors nor .*\.index\.json, only pytorch_model\.bin; weights")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    refused(r"index\.json is damaged \(KeyError: 'weight_map'\); get it again")
    index.write_text(json.dumps({"weight_map": {f"w{k}": f"{k}.safetensors" for k in range(7)}}))
    refused(r"names 7 files, of which 0\.safetensors, .* and 2 more cannot be found; get the model")
    index.unlink()
    AutoModelForCausalLM.from_config(LlamaConfig(**llama_config())).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(r"model\.safetensors is damaged or cut short \(.*\); delete it and get it again")
