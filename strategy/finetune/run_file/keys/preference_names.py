"""Names that other fine-tuning tools have for the keys of preference tuning."""

from __future__ import annotations

from thunder_memsave.finetune.run_file.keys.foreign_name import AXOLOTL, TRAINER, ForeignName

_LOSSES = "dpo, orpo or kto; without the section the loss is the cross-entropy of the target tokens"
_REFERENCE = "they are computed once, before the first step, in every run; leave it out"


def _here(key: str, *tools: str, note: str = "") -> ForeignName:
    return ForeignName(tools=tools, here=(f"preference.{key}",), note=note)


PREFERENCE_NAMES = {
    "rl": _here("loss", AXOLOTL, note=_LOSSES),
    "loss_type": _here("loss", TRAINER, note=_LOSSES),
    "beta": _here("beta", TRAINER),
    "dpo_beta": _here("beta", AXOLOTL),
    "rl_beta": _here("beta", AXOLOTL),
    "orpo_alpha": _here("beta", AXOLOTL),
    "kto_desirable_weight": _here("desirable_weight", AXOLOTL),
    "kto_undesirable_weight": _here("undesirable_weight", AXOLOTL),
    "desirable_weight": _here("desirable_weight", TRAINER),
    "undesirable_weight": _here("undesirable_weight", TRAINER),
    "precompute_ref_log_probs": ForeignName(tools=(TRAINER,), here=(), note=_REFERENCE),
}
