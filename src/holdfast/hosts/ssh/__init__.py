"""`holdfast run --hosts node1,node2:8 train.py`: one command that starts and owns the agents of all its hosts, by ssh.

The parts, and what each decides or does:

    host_list   PURE  which hosts, with how many workers each, from --hosts or a hostfile
    command     PURE  the command line of ssh, and what an ssh that has ended means
    messages    PURE  what this command and a remote agent say to each other
    launch      PURE  the machine: which host is connected, started, lost; when and how all of it ends
    output      PURE  the output of all hosts on one console
    copying           the files that --copy sends along
    connection        one ssh process and its pipes
    run               the loop around all of it

The other end of each connection is `remote_agent`, which becomes the agent of its host.

**One connection.** Each host has one ssh process for as long as the run lasts:

    this command                     ssh                 the host
      stdin   --- order, signals, pings ----->  read by a thread of the agent
      stdout  <-- hello line, then the stdout of the workers
      stderr  <-- the stderr of the workers, and the agent's own words in frames

1. ssh starts the interpreter on the host. It says hello in one line: version, the address at which ssh reached it, and
   a port at that address that it has bound and holds. Anything before that line is noise of the host's shell.
2. When every host has said hello or has failed, the order goes to each that takes part: the token, the environment, the
   directory, the command line of `holdfast run`, and where the nodes meet. The token and the values of variables are in
   no command line and in no file.
3. The interpreter becomes the agent. The agent's own words come in frames, so that the same words of several hosts are
   shown once. Its last words and its exit code come in frames, too. An ssh that ends without an exit code has lost its
   host.

**Where the nodes meet.** At the first host that is connected, at the address at which ssh reached it, and at the port
that it holds. There the agent starts the coordinator, as at any endpoint. The port is bound before it is published, and
never let go, so no other process gets it. The alternatives are worse: a fixed port collides with another run; this
machine is often a laptop that the hosts cannot reach; a tunnel through ssh would make a broken connection look like a
coordinator that is down, which keeps workers alive. What it costs: if the first host is lost for good, the others give
up after a minute. `--rdzv-backend etcd` has no such host.

**How everything ends.** An agent lives no longer than its connection. If its stdin ends, or is silent for
`--host-timeout`, it stops its workers as after SIGTERM. This command sends a ping four times in that time, and ssh
itself finds out if the host does not answer (ServerAliveInterval). So each end notices by itself, whatever was killed:

    killed or lost                  noticed by
    this command                    the agents: their stdin ends
    one ssh process                 its agent: stdin ends. This command: the process ends without the last frame
    the network                     the agent: silence. This command: ssh ends after ServerAliveInterval
    the agent                       its spawner, which kills the workers. This command: ssh ends
    this command stands still       the agents: silence

A host that is lost is a lost node: the run goes on while `--nnodes MIN:MAX` allows it. The machine in `launch` has the
states of a host, and what follows from each event.
"""
