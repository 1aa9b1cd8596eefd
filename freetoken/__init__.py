"""`ft`: deploys Mixture-of-Experts models on machines too small for them, from one YAML recipe.

This package is the distribution `freetoken-deploy`. It never imports an engine that it launches; the
public Python API is `freetoken.api`, imported on demand so that `import freetoken` costs nothing.
"""

__version__ = "0.1.0"
