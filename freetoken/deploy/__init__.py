"""The apply loop: plan, diff, fetch, launch, prove, classify, retry, restore, record."""
