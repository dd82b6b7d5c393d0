"""Distillation: an HMM learns from a trained neural language model, its teacher.

`evidence` is what the teacher's hidden vectors say about the states of the training text, `teacher` writes text to learn
from, `hook` brings both into a run. The training loop knows the hook's protocol (`training.hooks`) and no teacher.
"""

from vlhmm.training.distillation.hook import Distillation, distillation_for
from vlhmm.training.distillation.teacher import Teacher

__all__ = ["Distillation", "Teacher", "distillation_for"]
