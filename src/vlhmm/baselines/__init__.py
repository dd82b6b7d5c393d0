"""Baselines with the same `LanguageModel` protocol: Kneser-Ney, feed-forward, LSTM."""

from vlhmm.baselines.feed_forward import FeedForward
from vlhmm.baselines.kneser_ney import KneserNey, estimate
from vlhmm.baselines.lstm import LSTM
from vlhmm.baselines.training import BaselineConfig, default_config, load_baseline, train_baseline

__all__ = [
    "LSTM",
    "BaselineConfig",
    "FeedForward",
    "KneserNey",
    "default_config",
    "estimate",
    "load_baseline",
    "train_baseline",
]
