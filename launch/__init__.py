"""The launcher, installed under the import name `ltc_launch`.

The directory is called `launch`; a top-level package of that name would collide with ROS 2's, so
setup.cfg maps it. Nothing here imports torch: the package must stay cheap to import before any
worker exists.
"""
