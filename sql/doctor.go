package sql

// DoctorFacts returns the query for what posthaste doctor wants to know of the server. It needs no schema.
func DoctorFacts() string { return query("doctor_facts") }

// DoctorPublication returns the query whether the publication $1 announces inserts into the outbox, and whether the role
// may create tables beside it.
func DoctorPublication() string { return query("doctor_publication") }

// DoctorSlot returns the query for the slot named $1.
func DoctorSlot() string { return query("doctor_slot") }
