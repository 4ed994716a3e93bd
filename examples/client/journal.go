package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/google/uuid"
)

// Order is what the user wants.
type Order struct {
	UserID   string `json:"user_id,omitempty"`
	Amount   int64  `json:"amount"`
	Currency string `json:"currency"`
}

// Operation is one intention of the user, with the key that it keeps from its first attempt until its outcome is known.
// It is on disk before anything is sent.
type Operation struct {
	Key  string          `json:"key"`
	Body json.RawMessage `json:"body"`

	path string
}

// Open returns the unfinished operation of the journal, regardless of o, or begins a new one for o.
func Open(path string, o Order) (*Operation, error) {
	text, err := os.ReadFile(path)
	switch {
	case err == nil:
		op := &Operation{path: path}
		if err := json.Unmarshal(text, op); err != nil {
			return nil, fmt.Errorf("read the journal: %w", err)
		}
		return op, nil
	case !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("read the journal: %w", err)
	}
	key, err := uuid.NewV7()
	if err != nil {
		return nil, fmt.Errorf("mint a key: %w", err)
	}
	body, err := json.Marshal(o)
	if err != nil {
		return nil, fmt.Errorf("encode the order: %w", err)
	}
	op := &Operation{Key: key.String(), Body: body, path: path}
	return op, op.save()
}

// save writes the operation atomically: after a crash, the file has all of it or is missing.
func (op *Operation) save() error {
	text, err := json.Marshal(op)
	if err != nil {
		return fmt.Errorf("encode the journal: %w", err)
	}
	f, err := os.CreateTemp(filepath.Dir(op.path), ".journal-*")
	if err != nil {
		return fmt.Errorf("write the journal: %w", err)
	}
	_, err = f.Write(text)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), op.path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fmt.Errorf("write the journal: %w", err)
	}
	return nil
}

// Done deletes the operation: its outcome is known, and its key is never used again.
func (op *Operation) Done() error {
	if err := os.Remove(op.path); err != nil {
		return fmt.Errorf("finish the journal: %w", err)
	}
	return nil
}
