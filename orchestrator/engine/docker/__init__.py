"""Workers in containers, one a slot: started by the node's own launch.sh, looked after through the docker SDK.

`spec` is cheap to import; `engine` brings the SDK along (a fifth of a second), so that only runs that use it pay.
"""
