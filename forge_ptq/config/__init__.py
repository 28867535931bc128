"""Every option of a run, typed. `load_config(path, overrides)` is the way in.

Light on purpose: importing it pulls in omegaconf and yaml, never torch or vllm.
"""

from .block import SCHEMES, Block, ConfigError, Scheme, to_plain
from .build import from_mapping
from .calibration import (
    CalibrationConfig,
    DriftConfig,
    MergeConfig,
    PlanConfig,
    SmoothingConfig,
)
from .load import load_config, load_mapping, save_config, to_yaml
from .loss import AdvantagesConfig, AlarmsConfig, LossConfig
from .placement import (
    ActorsConfig,
    ProcessOptions,
    ProvisionerConfig,
    ServiceOptions,
    ServicesConfig,
)
from .ptq import (
    DeadlinesConfig,
    GuardConfig,
    ProbeConfig,
    PTQConfig,
    SamplerConfig,
)
from .schema import (
    ConsoleConfig,
    DatasetConfig,
    DebugConfig,
    InjectConfig,
    MetricLoggingConfig,
    PolicyConfig,
    ReplayBufferConfig,
    RewardConfig,
    RunConfig,
    WandbConfig,
)
from .titan import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    CompileConfig,
    LRSchedulerConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    RefModelConfig,
    TrainerConfig,
    TrainingConfig,
)

__all__ = [
    "SCHEMES",
    "ActivationCheckpointConfig",
    "ActorsConfig",
    "AdvantagesConfig",
    "AlarmsConfig",
    "Block",
    "CalibrationConfig",
    "CheckpointConfig",
    "CompileConfig",
    "ConfigError",
    "ConsoleConfig",
    "DatasetConfig",
    "DeadlinesConfig",
    "DebugConfig",
    "DriftConfig",
    "GuardConfig",
    "InjectConfig",
    "LRSchedulerConfig",
    "LossConfig",
    "MergeConfig",
    "MetricLoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PTQConfig",
    "ParallelismConfig",
    "PlanConfig",
    "PolicyConfig",
    "ProbeConfig",
    "ProcessOptions",
    "ProvisionerConfig",
    "RefModelConfig",
    "ReplayBufferConfig",
    "RewardConfig",
    "RunConfig",
    "SamplerConfig",
    "Scheme",
    "ServiceOptions",
    "ServicesConfig",
    "SmoothingConfig",
    "TrainerConfig",
    "TrainingConfig",
    "WandbConfig",
    "from_mapping",
    "load_config",
    "load_mapping",
    "save_config",
    "to_plain",
    "to_yaml",
]
