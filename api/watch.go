package api

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"posthaste/internal/pause"
)

// watchedFile is a file of keys that is reloaded when it changes.
type watchedFile struct {
	path string
	// This names the file in errors and logs.
	what string
	// take replaces the keys by the file's and returns their number. On an error it changes nothing.
	take func(io.Reader) (int, error)
	// seen is the state of the file at the last read; nil: stat failed.
	seen atomic.Pointer[fileState]
}

type fileState struct {
	changed time.Time
	size    int64
	mode    fs.FileMode
}

func stateOf(i fs.FileInfo) *fileState { return &fileState{i.ModTime(), i.Size(), i.Mode()} }

// load reads the file and returns the number of its keys. It refuses a file that others than its owner and group may
// write to.
func (w *watchedFile) load() (int, error) {
	f, err := os.Open(w.path)
	if err != nil {
		return 0, fmt.Errorf("open the %s: %w", w.what, err)
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return 0, fmt.Errorf("open the %s: %w", w.what, err)
	}
	w.seen.Store(stateOf(info))
	if info.Mode().Perm()&0o002 != 0 {
		return 0, fmt.Errorf("the %s is writable by all users; chmod o-w it", w.what)
	}
	return w.take(f)
}

// lookEvery is the interval of checks for changes.
const lookEvery = time.Second

// run reloads the file when it changes, until ctx ends. It logs errors and then keeps the keys.
func (w *watchedFile) run(ctx context.Context, log *slog.Logger) {
	for pause.For(ctx, lookEvery) == nil {
		w.look(log.With("file", w.what))
	}
}

func (w *watchedFile) look(log *slog.Logger) {
	info, err := os.Stat(w.path)
	if seen := w.seen.Load(); err != nil && seen == nil || err == nil && seen != nil && *seen == *stateOf(info) {
		return
	}
	if err != nil {
		w.seen.Store(nil) // logged once
		log.Error("a file of keys cannot be read; the keys remain as they were", "err", err)
		return
	}
	n, err := w.load()
	if err != nil {
		log.Error("a file of keys was not taken; the keys remain as they were", "err", err)
		return
	}
	log.Info("keys reloaded", "keys", n)
}
