// Package demo runs the whole product on servers of its own and shows events arriving.
//
// It starts Postgres and Redis under a temporary folder, the processes of package app, and consumers; posts orders one
// by one and then under load, while the mode changes; and counts in the end what is in the stream against what was
// placed. It is a demonstration and a check of the installation: lost or duplicated events are an error.
//
// cmd/posthaste calls Run, once per process.
package demo
