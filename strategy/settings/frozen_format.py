"""Names the formats in which frozen weights of linear layers can be kept as bytes."""

from typing import Literal

FrozenFormat = Literal["nf4", "int8"]
