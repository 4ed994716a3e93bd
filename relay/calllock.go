package relay

import "sync"

// callLock is a mutex that is held over calls of a port, which take their time. Waiters get it in the order they came.
// Unlike a sync.Mutex it can be waited for in a synctest bubble, whose clock stands still while somebody waits for a
// mutex. The zero value is unlocked.
type callLock struct {
	mu      sync.Mutex
	held    bool
	waiting []chan struct{}
}

// Lock waits until the lock is free, or handed over.
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

// Unlock hands the lock over to whoever has waited longest.
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
