"""Health of training while it runs: two judges with the settings of ``[health]``. Pure.

``judge.Judge`` sees each step of the native trainer, with its completions and weights; a finding is a warning or ends
training. ``metric_judge.MetricJudge`` sees only the metrics that an external trainer logs, and warns.
"""
