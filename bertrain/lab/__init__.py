"""Methods and applications, built on what the trainer documents as public. The core imports METHODS alone from here."""

METHODS = {
    "adapters": ("bertrain.lab.options:AdapterOptions", "bertrain.lab.adapters:Adapters"),
    "distillation": ("bertrain.lab.options:DistillationOptions", "bertrain.lab.distillation.objective:Distillation"),
    "elastic": ("bertrain.lab.options:ElasticOptions", "bertrain.lab.elastic.training:SubNetworks"),
    "growth": ("bertrain.lab.options:GrowthOptions", "bertrain.lab.growth:Growth"),
    "replaced": ("bertrain.lab.options:ReplacedOptions", "bertrain.lab.replaced:ReplacedTokens"),
}
"""Our methods by name: where their options are, which need no torch, and where they are."""
