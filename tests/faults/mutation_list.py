"""The list of all mutations: every protection that `make mutations` removes."""

from __future__ import annotations

from data_mutations import DATA
from dataset_mutations import DATASET
from fallback_mutations import FALLBACK
from foreign_mutations import FOREIGN
from guard_mutations import GUARD
from huggingface_mutations import HUGGING_FACE
from loop_mutations import LOOP
from machine_mutations import MACHINE
from model_mutations import MODELS
from mutation import Mutation
from native_mutations import NATIVE
from process_mutations import PROCESS
from resume_mutations import RESUME
from sharded_mutations import SHARDED
from survival_mutations import SURVIVAL
from te_mutations import TRANSFORMER_ENGINE
from token_mutations import TOKENS
from torchao_mutations import TORCHAO
from tracking_mutations import TRACKING

MUTATIONS: tuple[Mutation, ...] = (
    *SURVIVAL,
    *SHARDED,
    *RESUME,
    *PROCESS,
    *GUARD,
    *FALLBACK,
    *LOOP,
    *MACHINE,
    *TRACKING,
    *DATA,
    *DATASET,
    *FOREIGN,
    *TOKENS,
    *NATIVE,
    *TORCHAO,
    *TRANSFORMER_ENGINE,
    *MODELS,
    *HUGGING_FACE,
)
