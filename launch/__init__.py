"""The launcher, installed under the import name `ltc_launch`.

The directory is called `launch`; a top-level package of that name would collide with ROS 2's, so
setup.cfg maps it. `spec` reads the command line and imports no torch, so that mistakes are told at
once; `agent` runs it; each process begins in `shim`.
"""
