package consumer

// bell wakes all goroutines that wait for a change. A channel with room for one signal would only wake one, which may
// not be concerned by the change, while another waits forever. It is guarded by the lock of the changed state. A
// goroutine gets the channel while it holds the lock under which it decides to wait, so it misses no change.
type bell struct{ ch chan struct{} }

// wait returns a channel that is closed at the next ring. The caller holds the lock.
func (b *bell) wait() <-chan struct{} {
	if b.ch == nil {
		b.ch = make(chan struct{})
	}
	return b.ch
}

// ring wakes all waiters. The caller holds the lock.
func (b *bell) ring() {
	if b.ch != nil {
		close(b.ch)
		b.ch = nil
	}
}
