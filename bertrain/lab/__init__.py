"""Methods and applications, built on the trainer's documented public parts. The core imports only METHODS from here."""

METHODS = {
    "adapters": ("bertrain.lab.options:AdapterOptions", "bertrain.lab.adapters:Adapters"),
    "distillation": ("bertrain.lab.options:DistillationOptions", "bertrain.lab.distillation.objective:Distillation"),
    "elastic": ("bertrain.lab.options:ElasticOptions", "bertrain.lab.elastic.training:SubNetworks"),
    "growth": ("bertrain.lab.options:GrowthOptions", "bertrain.lab.growth:Growth"),
    "replaced": ("bertrain.lab.options:ReplacedOptions", "bertrain.lab.replaced:ReplacedTokens"),
}
"""The built-in methods by name: the class of their options, which needs no torch, and their own class."""
