"""What only a GPU needs: graphs, copies beside the running work. Everything here also runs, plainly, without one."""
