package consumer

// bell wakes everybody who waits for a change of something, where a channel with room for one signal would wake one of
// them: it may be the one to whom this change means nothing, and the other one then waits forever. It belongs to the
// lock of that something. Whoever finds that it has to wait takes the channel under the same hold of the lock, so that
// no change falls between the two.
type bell struct{ ch chan struct{} }

// wait returns a channel that is closed at the next ring. The caller holds the lock.
func (b *bell) wait() <-chan struct{} {
	if b.ch == nil {
		b.ch = make(chan struct{})
	}
	return b.ch
}

// ring tells everybody of a change. The caller holds the lock.
func (b *bell) ring() {
	if b.ch != nil {
		close(b.ch)
		b.ch = nil
	}
}
