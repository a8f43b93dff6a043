# SPDX-License-Identifier: Apache-2.0
"""GPUs by name, and tile shapes that fit every one of them."""

from __future__ import annotations

import pytest

from cupyinfer.errors import ArgumentError, UnsupportedError
from cupyinfer.schedule.profile import ARCHS, HOST_PROFILE, PROFILES, DeviceProfile, arch_for_capability, named_profile, profile_for_arch
from cupyinfer.schedule.tiles import CTA_TILE_Q, HEAD_DIMS, check_head_dims, decode_smem_bytes, max_tile_q, prefill_smem_bytes, tile_config


@pytest.mark.parametrize("profile", [*PROFILES.values(), HOST_PROFILE], ids=lambda profile: profile.name)
@pytest.mark.parametrize(("head_dim_qk", "head_dim_vo"), HEAD_DIMS)
@pytest.mark.parametrize("kv_itemsize", [1, 2])
def test_every_kernel_fits_every_gpu(profile: DeviceProfile, head_dim_qk: int, head_dim_vo: int, kv_itemsize: int) -> None:
    for tile_q in CTA_TILE_Q:
        if tile_q > max_tile_q(head_dim_vo):
            continue
        config = tile_config(tile_q, head_dim_qk, head_dim_vo, kv_itemsize, profile.smem_per_sm, profile.smem_per_cta)
        assert config.cta_tile_q == tile_q
        assert config.smem_bytes <= profile.smem_per_cta
        assert config.ctas_per_sm * (config.smem_bytes + 1024) <= profile.smem_per_sm
        assert config.ctas_per_sm >= 1
        dims = head_dim_qk, head_dim_vo, kv_itemsize
        if tile_q == 16:
            assert config.smem_bytes == decode_smem_bytes(config.num_warps, config.num_stages, config.join_slots, config.block_keys, *dims)
            assert config.num_stages >= 2
        else:
            assert config.smem_bytes == prefill_smem_bytes(tile_q, config.kv_tile, config.num_stages, *dims)


def test_three_ctas_where_registers_suffice() -> None:
    h200 = (PROFILES["h200"].smem_per_sm, PROFILES["h200"].smem_per_cta)
    plain = tile_config(128, 64, 64, 2, *h200)
    assert (plain.ctas_per_sm, plain.num_stages) == (3, 2)
    others = [
        tile_config(128, 64, 64, 2, *h200, transforms_logits=True),
        tile_config(128, 64, 64, 1, *h200),
        tile_config(64, 64, 64, 2, *h200),
        tile_config(128, 96, 96, 2, *h200),
    ]
    for name in ("a100", "l4"):
        others.append(tile_config(128, 64, 64, 2, PROFILES[name].smem_per_sm, PROFILES[name].smem_per_cta))
    assert {config.ctas_per_sm for config in others} == {2}
    assert {config.num_stages for config in others} == {2}


def test_tiles_that_do_not_fit_are_refused() -> None:
    for tile_q in CTA_TILE_Q:
        with pytest.raises(UnsupportedError, match=r"^head_dim 128: 4096 bytes of shared memory per CTA are too few"):
            tile_config(tile_q, 128, 128, 2, 4096, 4096)


@pytest.mark.parametrize("head_dim", [0, 56, 72, 80, 100, 224, 512])
def test_other_head_dims_are_refused(head_dim: int) -> None:
    with pytest.raises(UnsupportedError, match=f"^head_dim: got {head_dim} .*supported are 64, 96, 128, 192"):
        check_head_dims(head_dim, head_dim)


def test_names() -> None:
    assert named_profile("h200").num_sms == 132
    assert named_profile("H200") is PROFILES["h200"]
    assert named_profile("host") is HOST_PROFILE
    assert named_profile(PROFILES["l4"]) is PROFILES["l4"]
    assert all(name == profile.name and profile.arch in ARCHS for name, profile in PROFILES.items())
    with pytest.raises(ArgumentError, match=r"^num_sms: got 0"):
        DeviceProfile("none", "sm_80", 0, 1, 1)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100"),
        ((12, 0), "sm_120"),
    ],
)
def test_archs(capability: tuple[int, int], arch: str) -> None:
    assert arch_for_capability(*capability) == arch
    assert profile_for_arch(arch).arch == arch


def test_unknown_archs() -> None:
    for capability in ((7, 5), (11, 0)):
        name = r"\.".join(map(str, capability))
        with pytest.raises(ArgumentError, match=rf"^compute capability {name}: no kernels .* 8\.0, .*10\.3, and 12\.0 or newer$"):
            arch_for_capability(*capability)
    with pytest.raises(ArgumentError, match=r"^arch: got 'sm_70', expected one of sm_80"):
        profile_for_arch("sm_70")
