"""`holdfast run --hosts node1,node2:8 train.py`: one command that starts and owns the agents of all its hosts, by ssh.

docs/architecture.md lists the parts.

**One connection.** Each host has one ssh process for as long as the run lasts:

    this command                     ssh                 the host
      stdin   --- order, signals, questions, pings ----->  remote_agent
      stdout  <-- hello line, then frames: the lines of the agent, answers, and its end

1. ssh starts the remote agent. It says hello in one line: version, the address at which ssh reached it, and a port at
   that address that it has bound and holds. Anything before that line is noise of the host's shell.
2. When every host has said hello or has failed, the order goes to each that takes part: the token, the environment, the
   directory, the command line of `holdfast run`, and where the nodes meet. The token and the values of variables are in
   no command line and in no file.
3. The remote agent starts the agent as its child (`host_agent`), and sends what it writes and how it ends. An ssh that
   ends without the latter has lost its host.

**Where the nodes meet.** At the first host that is connected, at the address at which ssh reached it, and at the port
that it holds. There the agent starts the coordinator, as at any endpoint. If that host is lost for good, the others
give up after a minute; `--rdzv-backend etcd` has no such host.

**Hosts that come and go.** With `--rejoin-hosts` the fleet prepares a lost host again, later each time: a new ssh, and
an agent that joins the run as any newcomer does. With `--host-discovery` a thread asks for the hosts, and a list that
has changed is an event like the first one. Agents are told the true maximum of nodes then; otherwise it is the number
of hosts that were reached, so that no round waits for a host that cannot come.

**Without a terminal.** `--detach` starts the same command line in a session of its own, with its output in a file, and
returns when that command has started the agents. `holdfast attach` finds it by its control socket.

**How everything ends.** An agent lives no longer than its connection, which is its lease (`host_agent`). This command
sends a ping four times in `--host-timeout`, and ssh itself finds out if the host does not answer (ServerAliveInterval).
So each end notices by itself, whatever was killed:

    killed or lost                  noticed by
    this command, one ssh process   the remote agent: stdin ends. This command: ssh ends without the agent's end
    the network                     the remote agent: silence. This command: ssh ends after ServerAliveInterval
    the remote agent                `die_with_parent`, which ends the agent. This command: ssh ends
    the agent                       its spawner, which kills the workers. The remote agent tells this command.
    the remote agent of the place   the coordinator there, which ends when no node is left (`HOLDFAST_JOB_PID`)
    this command stands still       the remote agents: silence
"""
