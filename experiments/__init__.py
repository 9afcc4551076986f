"""The published experiments, one package per paper, all started by `experiments.runner`.

python -m experiments.losing_less --list
python -m experiments.losing_less 3 --small
"""
