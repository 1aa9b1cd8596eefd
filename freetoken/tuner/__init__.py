"""The autotuner: model, verify, probe. It launches nothing and measures nothing itself; `deploy` and `bench` do."""
