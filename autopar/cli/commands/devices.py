"""``autopar devices`` and ``autopar pins``: what clusters and pins are made of."""

from __future__ import annotations

from autopar.cli.console import print_json, print_text
from autopar.cli.options import Json


def devices(as_json: Json = False) -> None:
    """List the devices that --cluster knows: memory, and the peak of products in each precision."""
    from autopar.hardware.shipped_devices import devices_summary, render_devices, shipped_devices

    found = shipped_devices()
    if as_json:
        print_json(devices_summary(found))
    else:
        print_text(render_devices(found))


def pins(as_json: Json = False) -> None:
    """List what --pin takes, with an example of each."""
    from autopar.planner.space.pin_kinds import pins_summary, render_pins

    if as_json:
        print_json(pins_summary())
    else:
        print_text(render_pins())
