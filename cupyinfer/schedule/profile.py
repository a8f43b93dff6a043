# SPDX-License-Identifier: Apache-2.0
"""What the schedule must know of a GPU, by name or as read from one."""

from __future__ import annotations

from dataclasses import dataclass

from cupyinfer.errors import ArgumentError, ArgumentTypeError
from cupyinfer.schedule.geometry import store_ints


@dataclass(frozen=True)
class DeviceProfile:
    """The facts of a GPU that sizes and schedules depend on.

    Attributes:
        name: how users name it.
        arch: what kernels are compiled for, such as "sm_90a".
        num_sms: streaming multiprocessors.
        smem_per_sm: shared memory of one SM, bytes.
        smem_per_cta: most dynamic shared memory one CTA may ask for, bytes.
    """

    name: str
    arch: str
    num_sms: int
    smem_per_sm: int
    smem_per_cta: int

    @property
    def l2_bytes(self) -> int:
        """Size of the L2 cache; of the arch's data-center GPU, so that a plan made by name equals the one made on the device."""
        return _L2_BYTES.get(self.arch, 40 * _MB)

    def __post_init__(self) -> None:
        for field in ("name", "arch"):
            if not isinstance(getattr(self, field), str):
                raise ArgumentTypeError(f"{field}: got {getattr(self, field)!r}, expected a string")
        store_ints(self, {"num_sms": 1, "smem_per_sm": 1, "smem_per_cta": 1})


_KB = 1024
_MB = 1024 * _KB
# As NVIDIA publishes them for one GPU of each arch, which others of it exceed: an H200 reports 60 MiB through its properties. The figure
# only enters a heuristic, the order of prefill tiles.
_L2_BYTES = {"sm_80": 40 * _MB, "sm_86": 6 * _MB, "sm_89": 48 * _MB, "sm_90a": 50 * _MB, "sm_100": 126 * _MB, "sm_120": 96 * _MB}
#: Shared memory by arch: (per SM, per CTA) bytes, from the CUDA programming guide's table of compute capabilities.
_SHARED_MEMORY = {
    "sm_80": (164 * _KB, 163 * _KB),
    "sm_86": (100 * _KB, 99 * _KB),
    "sm_89": (100 * _KB, 99 * _KB),
    "sm_90a": (228 * _KB, 227 * _KB),
    "sm_100": (228 * _KB, 227 * _KB),
    "sm_120": (100 * _KB, 99 * _KB),
}
#: The arch of each compute capability below 12.0.
_ARCH_OF = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 7): "sm_80", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100", (10, 3): "sm_100"}
#: Every arch the kernels are built for.
ARCHS = tuple(_SHARED_MEMORY)

_SMS = {
    "a100": ("sm_80", 108),
    "a30": ("sm_80", 56),
    "a10": ("sm_86", 72),
    "a40": ("sm_86", 84),
    "rtx3090": ("sm_86", 82),
    "l4": ("sm_89", 58),
    "l40s": ("sm_89", 142),
    "rtx4090": ("sm_89", 128),
    "h20": ("sm_90a", 78),
    "h100-pcie": ("sm_90a", 114),
    "h100": ("sm_90a", 132),
    "h200": ("sm_90a", 132),
    "gh200": ("sm_90a", 132),
    "b200": ("sm_100", 148),
    "rtx5090": ("sm_120", 170),
    "rtx-pro-6000": ("sm_120", 188),
}


def _profile(name: str, arch: str, num_sms: int) -> DeviceProfile:
    return DeviceProfile(name, arch, num_sms, *_SHARED_MEMORY[arch])


#: GPUs that can be planned for by name.
PROFILES = {name: _profile(name, arch, num_sms) for name, (arch, num_sms) in _SMS.items()}
#: What the host backend plans for: few CTAs, since NumPy runs them one after another.
HOST_PROFILE = _profile("host", "sm_80", 8)


def named_profile(profile: str | DeviceProfile) -> DeviceProfile:
    """The profile of a GPU name, or the profile itself.

    Raises:
        ArgumentError: a name that is not in PROFILES.
        ArgumentTypeError: neither a name nor a DeviceProfile.
    """
    if isinstance(profile, DeviceProfile):
        return profile
    if not isinstance(profile, str):
        raise ArgumentTypeError(f"profile: got {type(profile).__name__}, expected a DeviceProfile or a name")
    found = HOST_PROFILE if profile == "host" else PROFILES.get(profile.lower())
    if found is None:
        raise ArgumentError(f"profile: got {profile!r}, known are {', '.join(PROFILES)}; others are given as a DeviceProfile")
    return found


def profile_for_arch(arch: str) -> DeviceProfile:
    """A profile with the shared memory of `arch`, for compiling where no GPU is at hand.

    Raises:
        ArgumentError: an arch that is not in ARCHS.
    """
    if arch not in _SHARED_MEMORY:
        raise ArgumentError(f"arch: got {arch!r}, expected one of {', '.join(ARCHS)}")
    return _profile(arch, arch, 1)


def arch_for_capability(major: int, minor: int) -> str:
    """The arch whose kernels run on a GPU of that compute capability.

    Raises:
        ArgumentError: no kernels are built for it.
    """
    if (major, minor) in _ARCH_OF:
        return _ARCH_OF[major, minor]
    if major >= 12:
        return "sm_120"
    supported = ", ".join(f"{one}.{other}" for one, other in _ARCH_OF)
    raise ArgumentError(f"compute capability {major}.{minor}: no kernels are built for it; supported are {supported}, and 12.0 or newer")
