"""Workers and gateways with one thing replaced. Each module is run as a process, as `python -m draft_service` is."""


def replace(owner: object, name: str, value: object) -> None:
    """setattr that refuses to add: a fault that replaces nothing would leave a sound worker."""
    if not hasattr(owner, name):
        raise AttributeError(f"{owner} has no {name!r} any more: the fault must be put where the code now is")
    setattr(owner, name, value)
