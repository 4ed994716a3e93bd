SELECT name, epoch FROM relay_state
