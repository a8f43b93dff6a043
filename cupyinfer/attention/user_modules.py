# SPDX-License-Identifier: Apache-2.0
"""Attention modules whose kernels hold a user's CUDA source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cupyinfer.attention.call_errors import checked_call
from cupyinfer.attention.modules import AttentionModule, get_batch_decode_module, get_batch_prefill_module
from cupyinfer.attention.options import with_user_variant
from cupyinfer.attention.plan import Plan
from cupyinfer.attention.request import AttentionRequest
from cupyinfer.attention.user_arguments import user_values
from cupyinfer.backends.device import has_gpu
from cupyinfer.errors import ArgumentError, ArgumentTypeError, BackendUnavailable, UnsupportedError
from cupyinfer.jit.user_variant import UserVariant
from cupyinfer.schedule.profile import DeviceProfile
from cupyinfer.workspace import WorkspaceSize

_RUN_OPTIONS = ("out", "lse", "return_lse", "q_scale", "k_scale", "v_scale")


@dataclass(frozen=True)
class UserAttentionModule(AttentionModule):
    """An attention module changed by CUDA source. `plan` compiles it where that has not been done yet, in seconds.

    Attributes:
        user_variant: the source and its parameters.
    """

    user_variant: UserVariant | None = None

    def workspace_size(self, *args: Any, profile: str | DeviceProfile | None = None, **options: Any) -> WorkspaceSize:
        """Bytes that `plan` with the same arguments needs of each workspace: those of a soft cap on `backend="fa2"`.

        Args:
            args: as for the module without a variant.
            profile: the GPU to size for, by default the current one.
            options: as for the module without a variant.

        Raises:
            BackendUnavailable: there is no GPU here, and no profile was named.
        """
        if profile is None and not has_gpu():
            raise BackendUnavailable("profile: user variants run on GPUs and there is none here; name the one to size for")
        return super().workspace_size(*args, profile=profile, **options)

    @checked_call
    def run(self, plan: Plan, q: Any, *kv: Any, **options: Any) -> Any:
        """Run a plan of this module.

        Args:
            plan: what `plan` returned.
            q: [num_tokens, num_qo_heads, head_dim_qk].
            kv: the paged cache, or ragged k and v.
            options: those of a module without a variant, and every parameter of the variant by its name: numbers for scalars;
                contiguous arrays on the plan's device, of any shape, for tensors. Hooks index them: their size is not checked.

        Raises:
            ArgumentError: a parameter is missing, unknown, out of range or strided, or the plan belongs to another module.
            ArgumentTypeError: a parameter of another type than the variant says.
        """
        variant = self.user_variant
        if variant is None or plan.options.user_variant != variant:
            raise ArgumentError(f"plan: was not made by a module of variant {None if variant is None else variant.name}")
        given = {name: value for name, value in options.items() if name not in _RUN_OPTIONS}
        plain = {name: value for name, value in options.items() if name in _RUN_OPTIONS}
        k, v = self._kv_views(kv)
        return plan.run(q, k, v, **plain, user=user_values(variant, given, plan.device))

    def _request(self, *args: Any, **options: Any) -> AttentionRequest:
        request = super()._request(*args, **options)
        assert self.user_variant is not None
        request.options = with_user_variant(request.options, self.user_variant)
        return request


def _with_variant(module: AttentionModule, variant: UserVariant) -> UserAttentionModule:
    if not isinstance(variant, UserVariant):
        raise ArgumentTypeError(f"variant: got {type(variant).__name__}, expected a UserVariant")
    if module.backend == "host":
        raise BackendUnavailable(f"backend: variant {variant.name} is CUDA source, which the host backend cannot run; use 'fa2'")
    if module.backend == "fa3":
        raise UnsupportedError(f"backend: variant {variant.name} changes the fa2 kernel, 'fa3' has no user variants; use 'auto' or 'fa2'")
    return UserAttentionModule(module.request, module.fixed, module.paged, module.kv_layout, "fa2", variant)


@checked_call
def get_batch_decode_jit_module(
    variant: UserVariant,
    q_dtype: Any,
    kv_dtype: Any,
    head_dim_qk: int,
    head_dim_vo: int | None = None,
    *,
    kv_layout: str = "NHD",
    backend: str = "auto",
    **options: Any,
) -> UserAttentionModule:
    """Batch decode over a paged cache, changed by CUDA source.

    Args:
        variant: the source and its parameters.
        q_dtype, kv_dtype, head_dim_qk, head_dim_vo, kv_layout, options: as for `get_batch_decode_module`.
        backend: "auto" or "fa2".

    Returns:
        A module used like the one of `get_batch_decode_module`; its `run` takes the variant's parameters by name too.

    Raises:
        BackendUnavailable: the host backend was asked for.
        UnsupportedError: fa3 was asked for.
    """
    module = get_batch_decode_module(q_dtype, kv_dtype, head_dim_qk, head_dim_vo, kv_layout=kv_layout, backend=backend, **options)
    return _with_variant(module, variant)


@checked_call
def get_batch_prefill_jit_module(
    variant: UserVariant,
    q_dtype: Any,
    kv_dtype: Any,
    head_dim_qk: int,
    head_dim_vo: int | None = None,
    *,
    paged: bool = True,
    kv_layout: str = "NHD",
    backend: str = "auto",
    **options: Any,
) -> UserAttentionModule:
    """Batch prefill, changed by CUDA source, over a paged cache or over ragged keys and values.

    Args:
        variant: the source and its parameters.
        q_dtype, kv_dtype, head_dim_qk, head_dim_vo, paged, kv_layout, options: as for `get_batch_prefill_module`.
        backend: "auto" or "fa2".

    Returns:
        A module used like the one of `get_batch_prefill_module`; its `run` takes the variant's parameters by name too.

    Raises:
        BackendUnavailable: the host backend was asked for.
        UnsupportedError: fa3 was asked for.
    """
    module = get_batch_prefill_module(
        q_dtype, kv_dtype, head_dim_qk, head_dim_vo, paged=paged, kv_layout=kv_layout, backend=backend, **options
    )
    return _with_variant(module, variant)
