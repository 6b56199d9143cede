"""Memory and utilisation of the machine's GPUs through NVML (the extra `gpu`: nvidia-ml-py), where there are any."""

import logging
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

from service.metrics import Metrics

log = logging.getLogger(__name__)


def gpu_reporter(metrics: Metrics, load: Callable[[str], ModuleType] = import_module) -> Callable[[], None]:
    """What puts the GPUs' present state into the metrics, to be called now and then; does nothing without NVML.

    GPUs are numbered as NVML does it: all of the machine, whatever CUDA_VISIBLE_DEVICES says.
    """
    try:
        nvml = load("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    except ImportError:
        log.info("no GPU metrics: nvidia-ml-py is not installed (foreword[gpu])")
        return _nothing
    except Exception as error:  # NVMLError, whose class is only known once the import worked
        log.info("no GPU metrics: NVML says %s", type(error).__name__)
        return _nothing
    working = dict(enumerate(handles))

    def report() -> None:
        for number, handle in list(working.items()):
            try:
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                metrics.gpu_memory.labels(str(number)).set(memory.used)
                metrics.gpu_memory_total.labels(str(number)).set(memory.total)
                busy_percent = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
                metrics.gpu_utilization.labels(str(number)).set(busy_percent / 100)
            except nvml.NVMLError_NotSupported:  # a slice of a GPU has memory, but no utilisation
                continue
            except nvml.NVMLError as error:  # it fell off the bus, say
                log.warning("no metrics of GPU %d any more: %s", number, type(error).__name__)
                del working[number]

    return report


def _nothing() -> None:
    return None
