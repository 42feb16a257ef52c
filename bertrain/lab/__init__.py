"""Methods and applications, built on what the trainer documents as public. The core imports METHODS alone from here."""

METHODS = {
    "adapters": "bertrain.lab.adapters:Adapters",
    "distillation": "bertrain.lab.distillation.method:Distillation",
    "elastic": "bertrain.lab.elastic.training:SubNetworks",
    "growth": "bertrain.lab.growth:Growth",
    "replaced": "bertrain.lab.replaced:ReplacedTokens",
}
"""Our methods by name, each as module:class, which bertrain/methods.py imports."""
