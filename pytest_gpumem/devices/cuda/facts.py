"""Facts of a CUDA device, read without a context on it, by a child process: forked children of a
process that called cuInit cannot use CUDA."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import msgspec

from pytest_gpumem.devices.errors import NoDevice
from pytest_gpumem.ranges import Ranges
from pytest_gpumem.records.device import DeviceFacts, host_link, peak_bandwidth

SECONDS = 60.0  # how long the driver may take to answer

_ROOT = Path(__file__).resolve().parents[3]
# The child imports from beside this package, from its standard library, then as this process does:
# no module of the project hides one of theirs.
_PROGRAM = (
    "import sys; sys.path[:] = [sys.argv[2], *filter(None, sys.path), *sys.argv[3:]]; "
    "from pytest_gpumem.devices.cuda.facts import answer; answer(int(sys.argv[1]))"
)


def read_facts(index: int) -> list[DeviceFacts]:
    """As `query`, in a child process, but not under a profiler, which would follow it."""
    if not _installed("pynvml"):
        raise NoDevice("nvidia-ml-py cannot be imported: pip install nvidia-ml-py")
    for module, name in (("cupy", "CuPy"), ("cuda.bindings", "cuda-bindings")):
        if not _installed(module):
            from pytest_gpumem.devices.cuda import nvml

            if not nvml.present():
                raise NoDevice("no NVIDIA driver is loaded")
            extras = "in the clone: pip install -e '.[cuda13]' or '.[cuda12]'"
            raise NoDevice(f"{name} is not installed: {extras}")
    return query(index) if Ranges().tool_attached() else _of_process(index)


def _of_process(index: int) -> list[DeviceFacts]:
    command = [sys.executable, "-S", "-c", _PROGRAM, str(index), str(_ROOT)]
    command += filter(None, sys.path)
    try:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False
        )
    except OSError as error:  # such as an interpreter inside another program
        raise NoDevice(
            f"{sys.executable!r} cannot be started to ask the NVIDIA driver: {error.strerror}"
        ) from None
    except subprocess.TimeoutExpired:
        problem = f"the NVIDIA driver did not answer within {SECONDS:.0f} s"
        raise NoDevice(problem) from None
    lines, status = process.stdout.splitlines(), process.returncode
    if status or not lines:
        reason = process.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise NoDevice(f"the process that asks the NVIDIA driver ended with {status}: {reason[-1]}")
    result = msgspec.json.decode(lines[-1], type=list[DeviceFacts] | str)
    if isinstance(result, str):
        raise NoDevice(result)
    return result


def answer(index: int) -> None:
    """Print `query(index)`, or why there is none, as a line of JSON."""
    result: list[DeviceFacts] | str
    try:
        result = query(index)
    except NoDevice as unavailable:
        result = str(unavailable)
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(result) + b"\n")


def query(index: int) -> list[DeviceFacts]:
    """Facts of all GPUs that CUDA sees: of this one, of those that it can copy with directly (first
    that of `places.peer_of`), of the others. Calls cuInit. Raises `NoDevice`."""
    from cuda.bindings import driver

    count = _device_count(driver)
    among, visible = "", os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        among = f" (CUDA_VISIBLE_DEVICES={visible})"
    if count == 0:
        raise NoDevice(f"the driver sees no GPU{among}")
    if index >= count:
        gpus = f"{count} GPU{'s' * (count > 1)}"
        raise NoDevice(f"there is no device {index}: CUDA sees {gpus}, numbered from 0{among}")
    device = _value(driver.cuDeviceGet(index))
    others = [_value(driver.cuDeviceGet(other)) for other in range(count) if other != index]
    others.sort(key=lambda other: not _are_peers(driver, device, other))  # peers first
    driver_cuda = int(_value(driver.cuDriverGetVersion()))
    try:
        cupy_cuda = _cupy_version()
    except ImportError as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise NoDevice(f"CuPy cannot be imported: {reason}") from None
    if driver_cuda // 1000 < cupy_cuda // 1000:
        raise NoDevice(
            f"the driver supports CUDA {_dotted(driver_cuda)}, the installed CuPy needs CUDA "
            f"{cupy_cuda // 1000}: update the driver, or pip install -e "
            f"'.[cuda{driver_cuda // 1000}]' in the clone"
        )
    return [_read(driver, each, _dotted(cupy_cuda)) for each in (device, *others)]


def uuid_of(index: int) -> str:
    """The UUID of a device; calls cuInit. Raises `NoDevice`."""
    from cuda.bindings import driver

    count = _device_count(driver)
    if index >= count:
        raise NoDevice(f"this process sees {count} GPU{'s' * (count != 1)}")
    device = _value(driver.cuDeviceGet(index))
    return _uuid(driver, device, _name(driver, device)[1])


def _are_peers(driver: Any, device: Any, other: Any) -> bool:
    for pair in ((device, other), (other, device)):
        error, can_access = driver.cuDeviceCanAccessPeer(*pair)
        if int(error) != 0 or not can_access:
            return False
    return True


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _device_count(driver: Any) -> int:
    try:
        (error,) = driver.cuInit(0)
    # cuda-bindings raises RuntimeError or another class, by version, where libcuda is not found
    except Exception as missing:
        reason = str(missing).splitlines() or [type(missing).__name__]
        raise NoDevice(f"no NVIDIA driver: {reason[0]}") from None
    if error == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        return 0
    if error != driver.CUresult.CUDA_SUCCESS:
        raise NoDevice(f"the NVIDIA driver does not start: {error.name}")
    return int(_value(driver.cuDeviceGetCount()))


def _cupy_version() -> int:
    """CuPy's CUDA version, as 1000 x major + 10 x minor."""
    try:
        # `cupy.cuda.runtime` without the rest of CuPy, which is imported with the device
        from cupy_backends.cuda.api import runtime
    except ImportError:  # where CuPy itself has to find the libraries first
        from cupy.cuda import runtime

    return int(runtime.runtimeGetVersion())


def _read(driver: Any, device: Any, cuda: str) -> DeviceFacts:
    import pynvml

    from pytest_gpumem.devices.cuda import nvml

    def attribute(name: str) -> int:
        """An attribute; 0 where this driver does not know it."""
        number = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        error, value = driver.cuDeviceGetAttribute(number, device)
        return int(value) if error == driver.CUresult.CUDA_SUCCESS else 0

    name, profile = _name(driver, device)
    bus_id = _text(_value(driver.cuDeviceGetPCIBusId(32, device)))
    handle = nvml.handle(bus_id)
    integrated = bool(attribute("INTEGRATED"))
    host_page_tables = bool(attribute("PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES"))
    link = link_bandwidth = driver_version = None
    if handle is not None:
        driver_version = nvml.answer(pynvml.nvmlSystemGetDriverVersion)
        # The present generation drops while the GPU idles.
        generation = nvml.answer(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle) or 0
        width = nvml.answer(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle) or 0
        link, link_bandwidth = host_link(
            generation, width, integrated=integrated, host_page_tables=host_page_tables
        )
    clock, bus = 1e3 * attribute("MEMORY_CLOCK_RATE"), attribute("GLOBAL_MEMORY_BUS_WIDTH")
    major, minor = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
    return DeviceFacts(
        name=name,
        simulated=False,
        compute_capability=(major, minor),
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        max_threads_per_sm=attribute("MAX_THREADS_PER_MULTIPROCESSOR"),
        memory_bytes=int(_value(driver.cuDeviceTotalMem(device))),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        persisting_l2_max_bytes=attribute("MAX_PERSISTING_L2_CACHE_SIZE"),
        access_policy_max_window_bytes=attribute("MAX_ACCESS_POLICY_WINDOW_SIZE"),
        memory_clock_hz=clock,
        dram_peak=peak_bandwidth(clock, bus),
        async_engines=attribute("ASYNC_ENGINE_COUNT"),
        can_map_host=bool(attribute("CAN_MAP_HOST_MEMORY")),
        concurrent_managed_access=bool(attribute("CONCURRENT_MANAGED_ACCESS")),
        integrated=integrated,
        shared_bytes_per_sm=attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR") or None,
        max_shared_bytes_per_block=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") or None,
        host_page_tables=host_page_tables,
        uuid=_uuid(driver, device, profile),
        ecc=bool(attribute("ECC_ENABLED")),
        mig_profile=profile,
        mps=bool(attribute("MPS_ENABLED")),
        driver=driver_version,
        cuda=cuda,
        link=link,
        link_bandwidth=link_bandwidth,
        sm_clock_hz=1e3 * attribute("CLOCK_RATE") or None,
        pci_bus_id=bus_id,
    )


def split_mig(name: str) -> tuple[str, str | None]:
    """Split "NVIDIA H100 80GB HBM3 MIG 1g.10gb" into name and MIG profile."""
    match = re.fullmatch(r"(.+?) MIG (\S+)", name)
    return (match[1], match[2]) if match else (name, None)


def _name(driver: Any, device: Any) -> tuple[str, str | None]:
    return split_mig(_text(_value(driver.cuDeviceGetName(256, device))))


def _uuid(driver: Any, device: Any, profile: str | None) -> str:
    # In CUDA 12 the second version alone gives the UUID of a MIG instance; CUDA 13 has no other.
    ask = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
    return f"{'MIG' if profile else 'GPU'}-{uuid.UUID(bytes=bytes(_value(ask(device)).bytes))}"


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode()


def _value(result: Any) -> Any:
    error, value = result
    if int(error) != 0:
        raise NoDevice(f"the NVIDIA driver does not answer: {error.name}")
    return value


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
