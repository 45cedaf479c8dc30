"""The launcher, installed under the import name `ltc_launch`.

The directory is called `launch`. A top-level package of that name would collide with ROS 2's, so setup.cfg maps it.
`spec` reads the command line without importing torch, so that mistakes are reported at once. `agent` runs the job;
each process begins in `shim`.
"""
