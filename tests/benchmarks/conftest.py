"""The trainers of tests/learn serve here too."""

from tests.learn.conftest import make_trainer as make_trainer
