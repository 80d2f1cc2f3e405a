"""One reader of a run, for every command and page that shows or steers one.

    ask        questions: agents of this host by their control sockets, the coordinator and other nodes through them, or
               the coordinator at an endpoint. Answers are decoded here, once, into the records that the sender has.
    run_view   what the answers say together (`RunView`), each with the time at which it came
    words      the sentences and cells in which people read a view
    log_tail   the logs of workers, followed through restarts, rotation and a coordinator's restart
    stacks     where the workers of all nodes are

What a view can be:

    the coordinator answers              all nodes are known. The workers of a node are known if its agent has answered.
    the coordinator is silent or gone    `problem` says why. The agents of this host answer for themselves.
    a node does not answer               `silent` says why, and the coordinator when it heard the node last
    there are more nodes than are asked  `not_asked` counts them
    the run has ended                    `end`: the last word of an agent of this host, or the coordinator's outcome

Two instants are not mixed: the coordinator's answer says which round it is, and what an agent has said of another round
is not counted. Every question has a short deadline of its own, and nodes are asked at the same time, so a node that is
frozen delays a view by less than a second. What peers send is bounded in size, checked by type when it is decoded, and
escaped when it is shown.
"""
