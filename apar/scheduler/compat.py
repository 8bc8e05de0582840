"""What the scheduler needs of vLLM: a version it was tested with, and no feature it would break."""

from typing import TYPE_CHECKING

import vllm

from apar.options import ControlTokens, OptionError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TESTED_VERSIONS = ("0.32.0",)


class UnsupportedEngine(RuntimeError):
    """The forking scheduler cannot run in this engine; the message says why and what would do."""


def check_version(version: str = vllm.__version__) -> None:
    """Refuse a vLLM that this scheduler was not tested with.

    vLLM's scheduler interface is not public: a release may change what our hooks rely on without any error, and then
    answers would be wrong in silence.

    Raises:
        UnsupportedEngine
    """
    if version.split("+")[0] not in TESTED_VERSIONS:
        raise UnsupportedEngine(
            f"the forking scheduler was tested with vLLM {', '.join(TESTED_VERSIONS)}, this is {version}: "
            f"install vllm=={TESTED_VERSIONS[-1]}, or start the engine without scheduler_cls"
        )


def check_engine(config: "VllmConfig") -> None:
    """Refuse an engine whose other features need what forking uses.

    Raises:
        UnsupportedEngine
    """
    refused = (
        (config.kv_transfer_config is not None, "kv_transfer_config", "the receipt travels in kv_transfer_params"),
        (config.ec_transfer_config is not None, "ec_transfer_config", "a child would ask for its encoder inputs again"),
        (config.model_config.is_encoder_decoder, "an encoder-decoder model", "children share decoder blocks only"),
        (config.model_config.return_sampling_mask, "return_sampling_mask", "masks are not put in restored order"),
        (config.aux_output_config.enabled, "aux_output_config", "its outputs are not put in restored order"),
    )
    for present, name, reason in refused:
        if present:
            raise UnsupportedEngine(f"the forking scheduler does not work with {name}, {reason}: leave one of them out")


def check_vocabulary(control: ControlTokens | None, vocab_size: int) -> None:
    """Refuse control tokens that the model does not have: banning them would write outside its logits.

    Raises:
        OptionError
    """
    for name, token_id in (("fork", control.fork), ("child", control.child)) if control else ():
        if token_id >= vocab_size:
            raise OptionError(f"{name}_token_id is {token_id}: the model's vocabulary has {vocab_size} tokens, from 0")
