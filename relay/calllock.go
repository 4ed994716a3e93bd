package relay

import "sync"

// callLock is a mutex that may be held during calls of a port, which can be slow. Waiters acquire it in the order of
// their arrival. Unlike with a sync.Mutex, a goroutine that waits for it counts as blocked in a synctest bubble, so the
// bubble's clock advances. The zero value is unlocked.
type callLock struct {
	mu      sync.Mutex
	held    bool
	waiting []chan struct{}
}

// Lock waits until the lock is free or handed over to the caller.
func (l *callLock) Lock() {
	l.mu.Lock()
	if !l.held {
		l.held = true
		l.mu.Unlock()
		return
	}
	turn := make(chan struct{})
	l.waiting = append(l.waiting, turn)
	l.mu.Unlock()
	<-turn
}

// Unlock hands the lock to the goroutine that has waited longest.
func (l *callLock) Unlock() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting) == 0 {
		l.held = false
		return
	}
	close(l.waiting[0])
	l.waiting = l.waiting[1:]
}
