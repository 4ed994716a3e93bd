package outbox

import (
	"context"
	"fmt"
)

// Source delivers committed events in commit order. It is implemented by posthaste/cdc.
type Source interface {
	// Run streams from the slot's confirmed position until ctx ends or the stream breaks, and returns only after the
	// connection is closed. Once the server has accepted START_REPLICATION (so that no other process can move the slot)
	// it calls started, and reads nothing before started has returned nil; an error from started ends Run with that
	// error. Chunks go to out; while out is full Run stops reading but keeps its connection alive.
	//
	// Errors that name a condition of the slot or server are *SlotError.
	Run(ctx context.Context, started func(ctx context.Context) error, out chan<- Chunk) error
	// Settled reports that every transaction whose End is at or below end is settled. It never blocks. The position
	// goes to the server with the next status message.
	Settled(end LSN)
}

// SlotStatus is what the server knows about the slot.
type SlotStatus struct {
	Exists bool
	Active bool
	// ActivePID is the walsender that holds the slot, 0 if none.
	ActivePID int
	// Lost is set when the slot was invalidated; Reason says why where the server tells.
	Lost   bool
	Reason string
	// Confirmed and Restart are the slot's confirmed_flush_lsn and restart_lsn.
	Confirmed, Restart LSN
	// RetainedBytes is the WAL the slot holds back: current position - Restart; 0 without a slot.
	RetainedBytes int64
	// ConfirmedLagBytes is current position - Confirmed.
	ConfirmedLagBytes int64
	// MaxKeepBytes is max_slot_wal_keep_size in bytes, -1 for unlimited.
	MaxKeepBytes int64
}

// Slots is the life cycle of the slot and its publication, over ordinary SQL connections. It is implemented by
// posthaste/cdc. Every call is bounded by a statement timeout of its own.
type Slots interface {
	// Status reads the slot's state. A missing slot is not an error.
	Status(ctx context.Context) (SlotStatus, error)
	// Ensure makes sure that the publication exists with the outbox table in it, and then that a usable slot exists,
	// creating or repairing what it may; it replaces an invalidated slot. Just before it creates a slot it calls
	// making, if that is not nil, and returns its error. created reports a new slot, whose position says nothing about
	// older rows. Errors are *SlotError where they name a condition.
	Ensure(ctx context.Context, making func(ctx context.Context) error) (created bool, err error)
	// Advance moves the (inactive) slot's confirmed position to target, which frees WAL as far as older transactions
	// allow, and provokes the running-transactions record that lets restart_lsn follow.
	Advance(ctx context.Context, target LSN) error
	// Nudge only provokes that record, for a slot that is being streamed.
	Nudge(ctx context.Context) error
	// Drop removes the slot, terminating a walsender that holds it. A missing slot is not an error.
	Drop(ctx context.Context) error
	// Evict terminates the walsender that holds the slot, if any, and waits until it is gone.
	Evict(ctx context.Context) error
}

// Reasons of a SlotError and of a transition out of the stream. The set is closed: they are metric labels.
const (
	ReasonWALLevel        = "wal_level"            // wal_level is not logical
	ReasonNoRight         = "no_replication_right" // the role has neither REPLICATION nor superuser
	ReasonPooler          = "pooler"               // a pooler is between the relay and the server
	ReasonSlotsFull       = "slots_full"           // max_replication_slots reached
	ReasonSendersFull     = "senders_full"         // max_wal_senders reached
	ReasonPublication     = "publication"          // missing, without the outbox table, or changed
	ReasonSlotMissing     = "slot_missing"
	ReasonSlotLost        = "slot_lost"
	ReasonSlotActive      = "slot_active"
	ReasonSlotForeign     = "slot_foreign" // another plugin or database
	ReasonDecode          = "decode"       // WAL that cannot be decoded
	ReasonSilent          = "silent"       // no bytes from the server
	ReasonConnection      = "connection"
	ReasonTransactionHeld = "transaction_held" // slot creation waits for an older transaction
	ReasonMissed          = "missed"           // audit: the stream passed a row without delivering it
	ReasonStalled         = "stalled"          // audit: the stream does not move while the WAL grows
	ReasonGiant           = "giant"            // a transaction that is better swept
	ReasonBudget          = "budget"
	ReasonToggle          = "toggle"
	ReasonFenced          = "fenced"
	ReasonGap             = "gap"
	ReasonRestarted       = "restarted" // the sink was restarted, or another server took its place
	ReasonLayout          = "layout"    // the streams per type were changed
	ReasonStop            = "stop"
	ReasonLeadership      = "leadership"
)

// SlotError is a named condition that keeps the stream from running. Events keep flowing by the sweep.
type SlotError struct {
	// Reason is one of the Reason constants.
	Reason string
	// Remedy says in one sentence what an operator can do.
	Remedy string
	Err    error
}

func (e *SlotError) Error() string {
	s := e.Reason
	if e.Err != nil {
		s = fmt.Sprintf("%s: %v", e.Reason, e.Err)
	}
	if e.Remedy != "" {
		s += " (" + e.Remedy + ")"
	}
	return s
}

// Unwrap returns the cause.
func (e *SlotError) Unwrap() error { return e.Err }
