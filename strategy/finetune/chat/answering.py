"""Generates answers with transformers, and prints each token as soon as it is there."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from thunder_memsave.compat.foreign_messages import first_line
from thunder_memsave.finetune.chat.find_weights import FoundWeights
from thunder_memsave.finetune.chat.options import ChatOptions
from thunder_memsave.finetune.data.data_files import DataFiles
from thunder_memsave.finetune.data.prepare import DATA_MODULE
from thunder_memsave.finetune.run_file.classes.class_spec import build
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.settings.problems import ConfigError

Message = dict[str, str]

_TEXT_CLASSES = ("PromptJSONL", "TextJSONL", "PlainText")
_TEXT_FORMATS = ("prompt", "text")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answering:
    """A loaded model, and how it is asked."""

    shown: str
    model: Any
    tokenizer: Any
    is_chat: bool
    """Whether the chat template renders messages; else text is continued."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Values of further names in the template, as in training."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `generate`."""

    def answer(self, messages: Sequence[Message]) -> str:
        """Print the answer to a conversation while it is made, and return it.

        Raises:
            ConfigError: the conversation leaves no room for an answer, or the template refuses it.
            KeyboardInterrupt: the user stopped it.
        """
        inputs = self._inputs(messages).to(self.model.device)
        num_tokens = inputs["input_ids"].shape[1]
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        left = self.generation["max_new_tokens"] if most is None else most - num_tokens
        if left < 1:
            raise ConfigError(
                f"the conversation has {num_tokens:,} tokens, and the model takes {most:,} with the answer; /new "
                "begins another."
            )
        arguments = {**self.generation}
        arguments["max_new_tokens"] = min(left, arguments["max_new_tokens"])
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        with torch.inference_mode():
            ids = self.model.generate(**inputs, **arguments, streamer=streamer)
        return str(self.tokenizer.decode(ids[0, num_tokens:], skip_special_tokens=True))

    def _inputs(self, messages: Sequence[Message]) -> Any:
        if not self.is_chat:
            return self.tokenizer(
                messages[-1]["content"], return_tensors="pt", return_token_type_ids=False
            )
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
                **self.variables,
            )
        except Exception as error:  # whatever the template raises
            raise ConfigError(
                f"the chat template refuses this conversation: {first_line(error)}"
            ) from error


def load_answering(found: FoundWeights, options: ChatOptions) -> Answering:
    """Load the weights, on a GPU if there is one.

    Raises:
        ConfigError: they cannot be loaded, or the options do not go with the tokenizer.
    """
    config = found.config
    tokenizer = _tokenizer(found)
    is_chat = _is_chat(tokenizer, config, options)
    model = _model(found)
    spec = {} if config is None else config.data.dataset.get("init_args") or {}
    return Answering(
        shown=found.shown,
        model=model,
        tokenizer=tokenizer,
        is_chat=is_chat,
        variables=(spec.get("chat_template_kwargs") or {}) if is_chat else {},
        generation=_generation(model, tokenizer, options),
    )


def _tokenizer(found: FoundWeights) -> Any:
    """Load the tokenizer beside the weights, or else the base model's."""
    directories = [found.base] if found.adapter is None else [found.adapter, found.base]
    directory = next((d for d in directories if (d / "tokenizer_config.json").is_file()), None)
    if directory is None:
        raise ConfigError(
            f"{' and '.join(map(str, directories))} have no tokenizer (tokenizer_config.json); copy that of the base "
            "model there."
        )
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        message = f"cannot load a tokenizer from {directory}: {first_line(error)}"
        raise ConfigError(message) from error


def _is_chat(tokenizer: Any, config: RunConfig | None, options: ChatOptions) -> bool:
    """Tell whether the model was trained on chats, as far as is known, or the template is all that is."""
    has_template = tokenizer.chat_template is not None
    if options.system is not None and not has_template:
        raise ConfigError(
            "--system needs a chat template, and the tokenizer has none: text is continued; leave it out."
        )
    if options.plain or not has_template:
        return False
    if config is None or options.system is not None:
        return True
    name = config.data.dataset["class_path"].rpartition(".")[2]
    return name not in _TEXT_CLASSES and not _reads_texts(config)


def _reads_texts(config: RunConfig) -> bool:
    """Tell whether files that are still there were read as texts or prompts."""
    try:
        dataset = build(config.data.dataset, where="data.dataset", default_module=DATA_MODULE)
        if not isinstance(dataset, DataFiles):
            return False
        return any(source.format.name in _TEXT_FORMATS for source in dataset.sources)
    except ConfigError:
        return False  # the files are elsewhere now; what is printed says how it is asked


def _model(found: FoundWeights) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "auto" if found.config is None else found.config.model.dtype
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            found.base, dtype=dtype, local_files_only=True
        )
        model = model.to(device)
        if found.adapter is not None:
            with warnings.catch_warnings():
                # peft 0.21 asks transformers by the old name.
                warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
                model = PeftModel.from_pretrained(model, found.adapter)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ConfigError(f"cannot load {found.shown}: {first_line(error)}") from error
    return model.eval()


def _generation(model: Any, tokenizer: Any, options: ChatOptions) -> dict[str, Any]:
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    pad = tokenizer.pad_token_id
    arguments: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        # Training ended answers with the tokenizer's; some models list more.
        "eos_token_id": sorted({*ends, tokenizer.eos_token_id} - {None}) or None,
        "pad_token_id": tokenizer.eos_token_id if pad is None else pad,
        "use_cache": True,
    }
    if options.temperature == 0:
        arguments |= {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    elif options.temperature is not None:
        arguments |= {"do_sample": True, "temperature": options.temperature}
    return arguments
