"""Names of our keys in other fine-tuning tools, for users who switch."""

from __future__ import annotations

from thunder_memsave.finetune.run_file.keys.foreign_name import (
    AXOLOTL,
    LITGPT,
    TORCHTUNE,
    TRAINER,
    UNSLOTH,
    ForeignName,
)
from thunder_memsave.finetune.run_file.keys.preference_names import PREFERENCE_NAMES

_PLANNING = "what does not fit is recomputed; with policy recompute_all, everything"
_OFFLOAD = "activations; the plan of memory.budget chooses which"
_QUANTIZED = "this version keeps frozen weights in nf4, int8, mxfp4, fp8, bfloat16 or float32"
_FROZEN = "model.frozen_weights"
_NF4_FACTS = "it is nf4 in blocks of 64, with double quantisation"


def _(*tools: str, here: str | tuple[str, ...] = (), note: str = "") -> ForeignName:
    return ForeignName(tools=tools, here=(here,) if isinstance(here, str) else here, note=note)


_LR = "optimizer.init_args.lr"
_DATASET = ("data.dataset.class_path", "data.dataset.init_args.path")
_STREAMING = "data.dataset.init_args.streaming"
_EVAL, _SAVE = "eval.every_n_steps", "checkpoint.every_n_steps"
_AT_START = "every run tokenizes its data when it starts; leave it out"
_CONVERT = "rows are made before the run, as messages, prompt and completion, or text"
_KERNELS = "the step runs PyTorch's own kernels; leave it out"
_LOSS = "the loss is in tiles of tokens without it; leave it out"
_FSDP = "FULL_SHARD is zero3, SHARD_GRAD_OP zero2, HYBRID_SHARD hybrid, NO_SHARD none"
_ONE_AXIS = "this version shards over data-parallel ranks only"
_SAME_LOSS = "the loss is the cross-entropy of the target tokens; leave it out"
_NOT_IN_SECTION = "such as {r: 16, lora_alpha: 32, target_modules: all-linear}"

FOREIGN_NAMES: dict[str, ForeignName] = {
    **PREFERENCE_NAMES,
    # the model
    "base_model": _(AXOLOTL, here="model.name_or_path"),
    "model_name_or_path": _(TRAINER, here="model.name_or_path"),
    "model_name": _(LITGPT, UNSLOTH, here="model.name_or_path"),
    "checkpoint_dir": _(LITGPT, TORCHTUNE, here="model.name_or_path"),
    "initial_checkpoint_dir": _(LITGPT, here="model.name_or_path"),
    "model_config": _(LITGPT, here="model.config", note="transformers' own fields"),
    "config_name": _(TRAINER, here="model.name_or_path", note="the model's directory has it"),
    "base_model_config": _(AXOLOTL, here="model.name_or_path", note="its directory has it"),
    "model_init_kwargs": _(TRAINER, here="model", note="see the keys of this section"),
    "model_revision": _(TRAINER, here="model.revision"),
    "tie_embeddings": _(LITGPT, note="the model's config.json says it; leave it out"),
    "tokenizer": _(TORCHTUNE, here="model.name_or_path", note="the model's directory has it"),
    "tokenizer_path": _(TORCHTUNE, here="model.name_or_path", note="the model's directory has it"),
    "tokenizer_type": _(AXOLOTL, here="model.name_or_path", note="the model's directory has it"),
    "tokenizer_config": _(AXOLOTL, here="model.name_or_path", note="its directory has it"),
    "tokenizer_dir": _(LITGPT, here="model.name_or_path", note="the model's directory has it"),
    "tokenizer_name": _(TRAINER, here="model.name_or_path", note="its directory has it"),
    "model_type": _(AXOLOTL, here="model.name_or_path", note="its config.json says the type"),
    "attn_impl": _(AXOLOTL, here="model.attn_implementation"),
    "flash_attention": _(AXOLOTL, here="model.attn_implementation", note="sdpa or eager"),
    "sdp_attention": _(AXOLOTL, here="model.attn_implementation", note="sdpa or eager"),
    "xformers_attention": _(AXOLOTL, here="model.attn_implementation", note="sdpa or eager"),
    "flex_attention": _(AXOLOTL, here="model.attn_implementation", note="sdpa or eager"),
    "eager_attention": _(AXOLOTL, here="model.attn_implementation", note="write eager"),
    "trust_remote_code": _(
        AXOLOTL, TRAINER, note="only architectures that transformers itself has are loaded"
    ),
    # number formats
    "bf16": _(AXOLOTL, TRAINER, here="model.dtype", note="bfloat16 or float32"),
    "fp16": _(
        AXOLOTL, TRAINER, here="model.dtype", note="bfloat16 or float32; float16 is not supported"
    ),
    "tf32": _(AXOLOTL, TRAINER, note="set torch.backends in a script of your own"),
    "precision": _(LITGPT, here=("model.dtype", "model.trainable_dtype")),
    "torch_dtype": _(AXOLOTL, TRAINER, here="model.dtype"),
    "bfloat16": _(AXOLOTL, here=("model.dtype", "model.trainable_dtype"), note="write bfloat16"),
    "float16": _(AXOLOTL, here="model.dtype", note="float16 is not supported"),
    "load_in_4bit": _(AXOLOTL, UNSLOTH, TRAINER, here=_FROZEN, note="write nf4"),
    "load_in_8bit": _(
        AXOLOTL,
        UNSLOTH,
        TRAINER,
        here=_FROZEN,
        note="write int8; products are those of model.dtype",
    ),
    "quantize": _(LITGPT, here=_FROZEN, note="nf4 for bnb.nf4-dq; the others are not supported"),
    "quantization_config": _(TRAINER, here=_FROZEN, note=_NF4_FACTS),
    "gptq": _(AXOLOTL, note=_QUANTIZED),
    "bnb_4bit_quant_type": _(TRAINER, here=_FROZEN, note="nf4; fp4 is not supported"),
    "bnb_4bit_compute_dtype": _(TRAINER, here="model.dtype", note="bfloat16 or float32"),
    "bnb_4bit_use_double_quant": _(AXOLOTL, TRAINER, here=_FROZEN, note=_NF4_FACTS),
    "use_bnb_nested_quant": _(TRAINER, here=_FROZEN, note=_NF4_FACTS),
    "bnb_4bit_quant_storage": _(
        TRAINER, note="bytes are gathered as bytes, whatever the mode; leave it out"
    ),
    # adapters
    "lora_r": _(AXOLOTL, LITGPT, TRAINER, UNSLOTH, here="lora.r"),
    "lora_rank": _(TORCHTUNE, here="lora.r"),
    "rank": _(here="lora.r", note="peft's name"),
    "lora_alpha": _(AXOLOTL, LITGPT, TRAINER, UNSLOTH, here="lora.lora_alpha"),
    "alpha": _(here="lora.lora_alpha", note="peft's name"),
    "lora_dropout": _(AXOLOTL, LITGPT, TRAINER, UNSLOTH, here="lora.lora_dropout"),
    "lora_target_modules": _(AXOLOTL, TRAINER, here="lora.target_modules"),
    "lora_attn_modules": _(TORCHTUNE, here="lora.target_modules", note="such as [q_proj, v_proj]"),
    "apply_lora_to_mlp": _(TORCHTUNE, here="lora.target_modules", note="all-linear has the MLP"),
    "target_modules": _(UNSLOTH, here="lora.target_modules"),
    "lora_target_linear": _(AXOLOTL, here="lora.target_modules", note="write all-linear"),
    "lora_modules_to_save": _(AXOLOTL, TRAINER, here="lora.modules_to_save"),
    "peft_use_rslora": _(AXOLOTL, here="lora.use_rslora"),
    "lora_fan_in_fan_out": _(AXOLOTL, here="lora.fan_in_fan_out"),
    "peft_use_dora": _(AXOLOTL, here="lora.use_dora"),
    "use_dora": _(TRAINER, here="lora.use_dora"),
    "use_rslora": _(TRAINER, UNSLOTH, here="lora.use_rslora"),
    "lora_task_type": _(TRAINER, note="a run trains a causal language model; leave it out"),
    "lora_query": _(LITGPT, here="lora.target_modules", note="such as [q_proj, v_proj]"),
    "lora_key": _(LITGPT, here="lora.target_modules", note="such as [k_proj]"),
    "lora_value": _(LITGPT, here="lora.target_modules", note="such as [q_proj, v_proj]"),
    "lora_projection": _(LITGPT, here="lora.target_modules", note="such as [o_proj]"),
    "lora_mlp": _(LITGPT, here="lora.target_modules", note="[gate_proj, up_proj, down_proj]"),
    "lora_head": _(LITGPT, here="lora.target_modules", note="such as [lm_head]"),
    "lora_model_dir": _(AXOLOTL, note="a run starts a new adapter, or goes on by resume"),
    "lora_mlp_kernel": _(AXOLOTL, note=_KERNELS),
    "lora_qkv_kernel": _(AXOLOTL, note=_KERNELS),
    "lora_o_kernel": _(AXOLOTL, note=_KERNELS),
    "loraplus_lr_ratio": _(AXOLOTL, note="all trained weights have one learning rate"),
    "use_peft": _(TRAINER, here="lora", note=_NOT_IN_SECTION),
    "peft_config": _(TRAINER, here="lora", note=_NOT_IN_SECTION),
    # the data
    "datasets": _(AXOLOTL, here=_DATASET),
    "dataset": _(TORCHTUNE, here=_DATASET),
    "dataset_name": _(TRAINER, here=_DATASET),
    "dataset_path": _(LITGPT, here=_DATASET),
    "json_path": _(LITGPT, here=_DATASET),
    "pretraining_dataset": _(AXOLOTL, here=_DATASET, note="TextJSONL"),
    "dataset_config": _(TRAINER, note="data sets are local files, such as JSONL"),
    "dataset_train_split": _(TRAINER, here="data.dataset.init_args.path", note="a file"),
    "dataset_test_split": _(TRAINER, here="data.dataset.init_args.val_path", note="a file"),
    "dataset_streaming": _(TRAINER, here=_STREAMING, note="of DataFiles"),
    "streaming": _(AXOLOTL, here=_STREAMING, note="of DataFiles"),
    "prompt_style": _(LITGPT, note=_CONVERT),
    "formatting_func": _(TRAINER, note=_CONVERT),
    "train_file": _(TRAINER, here="data.dataset.init_args.path"),
    "validation_file": _(TRAINER, here="data.dataset.init_args.val_path"),
    "val_set_size": _(
        AXOLOTL, here="data.dataset.init_args.val_fraction", note="a fraction of the rows"
    ),
    "val_split_fraction": _(LITGPT, here="data.dataset.init_args.val_fraction"),
    "test_datasets": _(AXOLOTL, here="data.dataset.init_args.val_path"),
    "sequence_len": _(AXOLOTL, here="data.max_seq_length"),
    "max_seq_len": _(TORCHTUNE, here="data.max_seq_length"),
    "max_length": _(TRAINER, here="data.max_seq_length"),
    "max_seq_length": _(LITGPT, UNSLOTH, here="data.max_seq_length"),
    "seq_len": _(here="data.max_seq_length"),
    "sample_packing": _(AXOLOTL, here="data.packing"),
    "packed": _(TORCHTUNE, here="data.packing"),
    "pad_to_sequence_len": _(AXOLOTL, here="data.packing", note="false pads; rows are all as long"),
    "eval_sample_packing": _(AXOLOTL, here="data.packing", note="the same for both sets"),
    "eval_packing": _(TRAINER, here="data.packing", note="the same for both sets"),
    "packing_strategy": _(TRAINER, here="data.packing", note="documents are cut only if they must"),
    "padding_free": _(TRAINER, here="data.packing", note="packed rows have hardly any padding"),
    "train_on_inputs": _(AXOLOTL, here="data.train_on", note="all or assistant"),
    "mask_prompt": _(LITGPT, here="data.train_on", note="all or assistant"),
    "assistant_only_loss": _(TRAINER, here="data.train_on", note="write assistant"),
    "completion_only_loss": _(TRAINER, here="data.train_on", note="write assistant"),
    "roles_to_train": _(AXOLOTL, here="data.train_on", note="assistant or all"),
    "train_on_eos": _(AXOLOTL, note="an answer's end of turn is always trained on; leave it out"),
    "response_template": _(TRAINER, here="data.train_on", note="write assistant"),
    "chat_template": _(AXOLOTL, note="the tokenizer's own is used; put it in chat_template.jinja"),
    "dataset_text_field": _(
        TRAINER, UNSLOTH, here="data.dataset.class_path", note="TextJSONL reads 'text'"
    ),
    "chat_template_path": _(
        TRAINER, note="the tokenizer's own is used; put it in chat_template.jinja"
    ),
    "chat_template_jinja": _(
        AXOLOTL, note="the tokenizer's own is used; put it in chat_template.jinja"
    ),
    "eos_token": _(TRAINER, note="the tokenizer's own are used; save it with yours"),
    "pad_token": _(TRAINER, note="the tokenizer's own are used; save it with yours"),
    "special_tokens": _(AXOLOTL, note="the tokenizer's own are used; save it with yours"),
    "dataset_prepared_path": _(AXOLOTL, note=_AT_START),
    "dataset_num_proc": _(TRAINER, UNSLOTH, note=_AT_START),
    "dataloader_num_workers": _(AXOLOTL, TRAINER, note=_AT_START),
    "group_by_length": _(AXOLOTL, TRAINER, here="data.packing", note="rows are all as long"),
    "data_seed": _(TRAINER, here="train.seed"),
    "shuffle_dataset": _(TRAINER, note="the order is shuffled in every epoch; leave it out"),
    "shuffle_merged_datasets": _(
        AXOLOTL, note="the order is shuffled in every epoch; leave it out"
    ),
    "dataset_processes": _(AXOLOTL, note=_AT_START),
    "dataloader_pin_memory": _(TRAINER, note=_AT_START),
    "dataloader_drop_last": _(TRAINER, note="no row is dropped; leave it out"),
    "remove_unused_columns": _(AXOLOTL, TRAINER, note="other keys of a row are left alone"),
    # batches and length
    "per_device_train_batch_size": _(TRAINER, UNSLOTH, here="train.micro_batch_size"),
    "per_device_eval_batch_size": _(
        TRAINER, here="train.micro_batch_size", note="evaluation has the same"
    ),
    "eval_batch_size": _(AXOLOTL, here="train.micro_batch_size", note="evaluation has the same"),
    "batch_size": _(
        TORCHTUNE, UNSLOTH, here="train.micro_batch_size", note="rows per forward pass on one GPU"
    ),
    "gradient_accumulation": _(TRAINER, here="train.gradient_accumulation_steps"),
    "eval_accumulation_steps": _(TRAINER, note="an evaluation keeps no outputs; leave it out"),
    "auto_find_batch_size": _(TRAINER, here="train.micro_batch_size", note="a number"),
    "max_tokens": _(LITGPT, here="train.max_steps", note="a number of steps"),
    "num_epochs": _(AXOLOTL, UNSLOTH, here="train.epochs"),
    "num_train_epochs": _(TRAINER, here="train.epochs"),
    "max_steps_per_epoch": _(TORCHTUNE, here="train.max_steps", note="of the whole run"),
    "clip_grad_norm": _(TORCHTUNE, here="train.max_grad_norm"),
    "optimizer_in_bwd": _(TORCHTUNE, here="memory.optimizer_in_backward"),
    "gradient_clip_val": _("Lightning", here="train.max_grad_norm"),
    "max_norm": _(LITGPT, here="train.max_grad_norm"),
    # loss
    "neftune_noise_alpha": _(AXOLOTL, TRAINER, note=_SAME_LOSS),
    "label_smoothing_factor": _(TRAINER, note=_SAME_LOSS),
    "loss_watchdog_patience": _(
        AXOLOTL, note="a loss that is not finite ends the run; leave it out"
    ),
    "loss_watchdog_threshold": _(
        AXOLOTL, note="a loss that is not finite ends the run; leave it out"
    ),
    # optimizer and schedule
    "learning_rate": _(AXOLOTL, TRAINER, UNSLOTH, here=_LR),
    "lr": _(TORCHTUNE, here=_LR),
    "weight_decay": _(AXOLOTL, LITGPT, TRAINER, UNSLOTH, here="optimizer.init_args.weight_decay"),
    "adam_beta1": _(AXOLOTL, TRAINER, here="optimizer.init_args.betas", note="[beta1, beta2]"),
    "adam_beta2": _(AXOLOTL, TRAINER, here="optimizer.init_args.betas", note="[beta1, beta2]"),
    "adam_epsilon": _(AXOLOTL, TRAINER, here="optimizer.init_args.eps"),
    "beta1": _(LITGPT, here="optimizer.init_args.betas", note="[beta1, beta2]"),
    "beta2": _(LITGPT, here="optimizer.init_args.betas", note="[beta1, beta2]"),
    "adafactor": _(TRAINER, here="optimizer.class_path", note="such as torch.optim.AdamW"),
    "optim": _(
        TRAINER,
        UNSLOTH,
        here="optimizer.class_path",
        note="such as torch.optim.AdamW; of adamw_8bit the rest is optimizer.states: int8",
    ),
    "optim_args": _(AXOLOTL, TRAINER, here="optimizer.init_args"),
    "lr_scheduler_type": _(TRAINER, UNSLOTH, here="lr_scheduler.name"),
    "lr_scheduler_kwargs": _(AXOLOTL, TRAINER, here="lr_scheduler.min_lr_ratio"),
    "cosine_min_lr_ratio": _(AXOLOTL, here="lr_scheduler.min_lr_ratio"),
    "min_lr": _(LITGPT, here="lr_scheduler.min_lr_ratio", note="a fraction of the optimizer's"),
    "warmup_ratio": _(
        AXOLOTL, TRAINER, here="lr_scheduler.warmup_steps", note="below 1 it is a fraction"
    ),
    "lr_warmup_steps": _(LITGPT, here="lr_scheduler.warmup_steps"),
    "lr_warmup_fraction": _(
        LITGPT, here="lr_scheduler.warmup_steps", note="below 1 it is a fraction"
    ),
    "num_warmup_steps": _(TORCHTUNE, here="lr_scheduler.warmup_steps"),
    # memory and sharding
    "gradient_checkpointing": _(
        AXOLOTL, TRAINER, UNSLOTH, here=("memory.budget", "memory.policy"), note=_PLANNING
    ),
    "gradient_checkpointing_kwargs": _(
        AXOLOTL, TRAINER, here=("memory.budget", "memory.policy"), note=_PLANNING
    ),
    "activation_checkpointing": _(TRAINER, here=("memory.budget", "memory.policy"), note=_PLANNING),
    "enable_activation_checkpointing": _(
        TORCHTUNE, here=("memory.budget", "memory.policy"), note=_PLANNING
    ),
    "activation_offloading": _(AXOLOTL, TRAINER, here="memory.offload", note=_OFFLOAD),
    "enable_activation_offloading": _(TORCHTUNE, here="memory.offload", note=_OFFLOAD),
    "fsdp": _(AXOLOTL, TRAINER, here="strategy.sharding", note=_FSDP),
    "fsdp_config": _(AXOLOTL, TRAINER, here="strategy.sharding", note=_FSDP),
    "fsdp_version": _(AXOLOTL, here="strategy.sharding", note="there is one version"),
    "dp_shard_size": _(
        AXOLOTL, here="strategy.sharding", note="{mode: hybrid, size: 8}; zero3 shards over all"
    ),
    "accelerator_config": _(TRAINER, here="strategy.sharding", note="zero2, zero3, hybrid or none"),
    "parallelism_config": _(TRAINER, note=_ONE_AXIS),
    "tensor_parallel_size": _(AXOLOTL, note=_ONE_AXIS),
    "context_parallel_size": _(AXOLOTL, note=_ONE_AXIS),
    "sequence_parallel_degree": _(AXOLOTL, note=_ONE_AXIS),
    "ddp_timeout": _(AXOLOTL, TRAINER, here="strategy.timeout", note="such as 30min"),
    "ddp_backend": _(TRAINER, note="nccl with GPUs, else gloo; leave it out"),
    "ddp_find_unused_parameters": _(TRAINER, note="not needed; leave it out"),
    "strict": _(AXOLOTL, note="a run file is always checked strictly; leave it out"),
    "local_rank": _(AXOLOTL, TRAINER, note="torchrun says it; leave it out"),
    "use_cpu": _(TRAINER, note="the CPU is used where there is no GPU; leave it out"),
    "plugins": _(AXOLOTL, note=_KERNELS),
    "use_liger_kernel": _(TRAINER, note=_KERNELS),
    "liger_rope": _(AXOLOTL, note=_KERNELS),
    "liger_rms_norm": _(AXOLOTL, note=_KERNELS),
    "liger_glu_activation": _(AXOLOTL, note=_KERNELS),
    "liger_fused_linear_cross_entropy": _(AXOLOTL, note=_LOSS),
    "deepspeed": _(
        AXOLOTL,
        TRAINER,
        here="strategy.sharding",
        note="stage 2 is zero2, stage 3 zero3; offload_optimizer is memory.offload: optimizer",
    ),
    "gpus": _("Lightning", here="devices", note="a number, or auto for all"),
    "ngpus": _(here="devices", note="a number, or auto for all"),
    "n_gpus": _(here="devices", note="a number, or auto for all"),
    "n_gpu": _(TRAINER, here="devices", note="a number, or auto for all"),
    "num_gpus": _("DeepSpeed", here="devices", note="a number, or auto for all"),
    "num_devices": _(here="devices", note="a number, or auto for all"),
    "num_processes": _("Accelerate", here="devices", note="those of this machine"),
    "nproc_per_node": _("torchrun", here="devices", note="or start the command by torchrun"),
    "world_size": _(here="devices", note="those of this machine; a plan has --world-size"),
    "nnodes": _("torchrun", note="start one torchrun per node; it says how many there are"),
    "num_nodes": _(LITGPT, note="start one torchrun per node; it says how many there are"),
    "torch_compile": _(AXOLOTL, TRAINER, note="the step is always compiled; leave it out"),
    "compile": _(TORCHTUNE, note="the step is always compiled; leave it out"),
    # evaluation, checkpoints, output
    "eval_steps": _(AXOLOTL, TRAINER, here=_EVAL),
    "evals_per_epoch": _(AXOLOTL, here=_EVAL, note="a number of steps"),
    "eval_strategy": _(AXOLOTL, TRAINER, here=_EVAL, note="a number of steps"),
    "evaluation_strategy": _(TRAINER, here=_EVAL, note="a number of steps"),
    "do_train": _(TRAINER, note="train trains; leave it out"),
    "do_eval": _(
        TRAINER, here="data.dataset.init_args.val_fraction", note="or val_path, which is evaluated"
    ),
    "eval_on_start": _(TRAINER, note="there is an evaluation at the start; leave it out"),
    "initial_validation": _(LITGPT, note="there is one at the start; leave it out"),
    "final_validation": _(LITGPT, note="there is one at the end; leave it out"),
    "max_new_tokens": _(LITGPT, here="eval.max_new_tokens", note="of eval.answers"),
    "evaluate_example": _(LITGPT, here="eval.answers", note="a number of prompts"),
    "eval_max_new_tokens": _(AXOLOTL, here="eval.max_new_tokens", note="of eval.answers"),
    "eval_table_size": _(AXOLOTL, here="eval.answers"),
    "run_val_every_n_steps": _(TORCHTUNE, here=_EVAL),
    "interval": _(LITGPT, here=_EVAL),
    "max_iters": _(LITGPT, here="eval.max_batches"),
    "save_steps": _(AXOLOTL, TRAINER, UNSLOTH, here=_SAVE),
    "saves_per_epoch": _(AXOLOTL, here=_SAVE, note="a number of steps"),
    "save_strategy": _(AXOLOTL, TRAINER, here=_SAVE, note="a number of steps"),
    "save_safetensors": _(AXOLOTL, TRAINER, note="what is exported always is; leave it out"),
    "save_only_model": _(AXOLOTL, TRAINER, note="checkpoints are for resuming; leave it out"),
    "load_best_model_at_end": _(
        AXOLOTL,
        TRAINER,
        note="the last step is exported; an earlier one by resume from its checkpoint",
    ),
    "metric_for_best_model": _(
        TRAINER,
        here="callbacks",
        note="{class_path: EarlyStopping, init_args: {monitor: val_loss}}",
    ),
    "greater_is_better": _(
        TRAINER, here="callbacks", note="{class_path: EarlyStopping, init_args: {mode: min}}"
    ),
    "overwrite_output_dir": _(TRAINER, note="a run is never written over; name another output_dir"),
    "save_interval": _(LITGPT, here=_SAVE),
    "save_every_n_steps": _(TORCHTUNE, here=_SAVE),
    "save_total_limit": _(AXOLOTL, TRAINER, here="checkpoint.keep_last"),
    "out_dir": _(LITGPT, here="output_dir"),
    "resume_from_checkpoint": _(AXOLOTL, TRAINER, TORCHTUNE, here="resume", note="a path or auto"),
    "auto_resume_from_checkpoints": _(AXOLOTL, here="resume", note="write auto"),
    "early_stopping_patience": _(
        AXOLOTL, here="callbacks", note="{class_path: EarlyStopping, init_args: {patience: 3}}"
    ),
    "push_to_hub": _(TRAINER, note="upload what a run wrote with `hf upload`"),
    "hub_strategy": _(AXOLOTL, TRAINER, note="upload what a run wrote with `hf upload`"),
    "hub_token": _(TRAINER, note="log in by `hf auth login`"),
    "access_token": _(LITGPT, note="log in by `hf auth login`"),
    "hub_model_id": _(AXOLOTL, TRAINER, note="upload what a run wrote with `hf upload`"),
    "report_to": _(TRAINER, here="loggers", note="[{class_path: TensorBoardLogger}]"),
    "wandb_project": _(
        AXOLOTL, here="loggers", note="[{class_path: WandbLogger, init_args: {project: ...}}]"
    ),
    "logger_name": _(LITGPT, here="loggers", note="[{class_path: TensorBoardLogger}]"),
    "wandb_entity": _(
        AXOLOTL, here="loggers", note="[{class_path: WandbLogger, init_args: {entity: ...}}]"
    ),
    "wandb_name": _(
        AXOLOTL, here="loggers", note="[{class_path: WandbLogger, init_args: {name: ...}}]"
    ),
    "run_name": _(
        TRAINER, here="loggers", note="[{class_path: WandbLogger, init_args: {name: ...}}]"
    ),
    "wandb_log_model": _(
        AXOLOTL, here="loggers", note="[{class_path: WandbLogger, init_args: {log_model: ...}}]"
    ),
    "wandb_watch": _(AXOLOTL, note="grad_norm is a metric of every step; leave it out"),
    "use_wandb": _(AXOLOTL, here="loggers", note="[{class_path: WandbLogger}]"),
    "use_tensorboard": _(AXOLOTL, here="loggers", note="[{class_path: TensorBoardLogger}]"),
    "use_mlflow": _(AXOLOTL, here="loggers", note="[{class_path: MLFlowLogger}]"),
    "mlflow_tracking_uri": _(
        AXOLOTL, here="loggers", note="[{class_path: MLFlowLogger, init_args: {tracking_uri: ...}}]"
    ),
    "logging_dir": _(
        TRAINER,
        here="loggers",
        note="[{class_path: TensorBoardLogger, init_args: {save_dir: ...}}]",
    ),
    "logging_strategy": _(TRAINER, note="every step is logged; leave it out"),
    "logging_first_step": _(TRAINER, note="every step is logged; leave it out"),
    "metric_logger": _(TORCHTUNE, here="loggers", note="[{class_path: TensorBoardLogger}]"),
    "logging_steps": _(AXOLOTL, TRAINER, here="train.log_every_n_steps"),
    "log_interval": _(LITGPT, here="train.log_every_n_steps"),
    "device": _(TORCHTUNE, note="all GPUs are used, or the CPU where there is none; leave it out"),
    "_component_": _(
        TORCHTUNE, here="class_path", note="of the section; its arguments go under init_args"
    ),
}


def foreign_name(key: str) -> ForeignName | None:
    """Look up the last part of an unknown key, however it is spelled."""
    return FOREIGN_NAMES.get(key.lower().replace("-", "_"))
